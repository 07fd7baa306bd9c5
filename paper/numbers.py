"""
The paper's printed numbers (arXiv:2410.17897), with which runs here are compared. Models and sizes
are named as in runs.Run.
"""

# Table 5: validation loss after 20B tokens, the mean over the seven domains, by model and size.
TABLE_5 = {
    ('vanilla', '82m'): 2.7389,
    ('vanilla', '180m'): 2.5015,
    ('vanilla', '468m'): 2.2806,
    ('resformer', '82m'): 2.7117,
    ('resformer', '180m'): 2.4692,
    ('resformer', '468m'): 2.2537,
}

# Table 1: zero-shot accuracy (acc) by model, size, and length of the training's sequences. At 64,000
# tokens the paper prints the average alone.
TABLE_1 = {
    ('vanilla', '82m', 2048): {
        'hellaswag': 0.263,
        'openbookqa': 0.142,
        'winogrande': 0.492,
        'arc_challenge': 0.199,
        'arc_easy': 0.331,
        'piqa': 0.572,
        'average': 0.333,
    },
    ('resformer', '82m', 2048): {
        'hellaswag': 0.273,
        'openbookqa': 0.148,
        'winogrande': 0.512,
        'arc_challenge': 0.182,
        'arc_easy': 0.414,
        'piqa': 0.604,
        'average': 0.355,
    },
    ('vanilla', '82m', 64000): {'average': 0.328},
    ('resformer', '82m', 64000): {'average': 0.350},
}

# What ResFormer saves at equal loss, by version of the paper: shares of (parameters, tokens).
SAVINGS = {'revision': (0.104, 0.136), 'v4': (0.133, 0.154), 'v5': (0.161, 0.203)}
