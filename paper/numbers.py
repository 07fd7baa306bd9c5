"""
The paper's printed numbers (arXiv:2410.17897), with which runs here are compared, and the models
that they belong to.
"""

from dataclasses import fields, replace
from pathlib import Path

from configurator import read_settings
from model import GPTConfig

CONFIGS = Path(__file__).parent.parent / 'config'

# The sizes of Table 4; config/vanilla_<size>.py says what they are. Tables 1 and 5 lack 2M.
SIZES = ('2M', '82M', '180M', '468M')

# What the models of Tables 1 and 5 differ in.
VARIANTS = {'Transformer': {}, 'ResFormer': {'v_residual': True}}

# Table 5: validation loss after 20B tokens, the mean over the seven domains.
TABLE_5 = {
    ('Transformer', '82M'): 2.7389,
    ('Transformer', '180M'): 2.5015,
    ('Transformer', '468M'): 2.2806,
    ('ResFormer', '82M'): 2.7117,
    ('ResFormer', '180M'): 2.4692,
    ('ResFormer', '468M'): 2.2537,
}

# Table 1: zero-shot accuracy (acc) of models trained on sequences of 2,048 and 64,000 tokens. At
# 64,000 the paper prints the average alone.
TABLE_1 = {
    ('Transformer', '82M', 2048): {
        'hellaswag': 0.263,
        'openbookqa': 0.142,
        'winogrande': 0.492,
        'arc_challenge': 0.199,
        'arc_easy': 0.331,
        'piqa': 0.572,
        'average': 0.333,
    },
    ('ResFormer', '82M', 2048): {
        'hellaswag': 0.273,
        'openbookqa': 0.148,
        'winogrande': 0.512,
        'arc_challenge': 0.182,
        'arc_easy': 0.414,
        'piqa': 0.604,
        'average': 0.355,
    },
    ('Transformer', '82M', 64000): {'average': 0.328},
    ('ResFormer', '82M', 64000): {'average': 0.350},
}


def paper_size(config):
    """(model, size), a key of TABLE_5, where a GPTConfig is a model of that table; else None.

    Sequence length, vocabulary and dropout may differ from the paper's.
    """
    for model, size in TABLE_5:
        theirs = GPTConfig(**shape(size), **VARIANTS[model])
        if resolved(config) == resolved(theirs):
            return model, size
    return None


def shape(size):
    """{field of GPTConfig: value} of a size of SIZES, from its config file."""
    settings = read_settings(CONFIGS / f'vanilla_{size.lower()}.py')
    names = {field.name for field in fields(GPTConfig)}
    return {name: value for name, value in settings.items() if name in names}


def resolved(config):
    """A GPTConfig with defaults written out, and without the fields that do not decide its size."""
    return replace(
        config,
        n_kv_head=config.kv_heads,
        n_inner=config.ffn_width,
        block_size=1,
        vocab_size=1,
        dropout=0.0,
    )
