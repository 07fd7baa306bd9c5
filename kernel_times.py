"""
Where the time of a training step goes: its costliest kernels, and the time of each class of kernels
beside what was expected before any GPU had been seen.

An expectation is no measurement. It is the FLOPs and bytes of a compiled step, which are counted,
divided by the rates in REACHED, which are assumed. The FLOPs are those of the row's model. The bytes
of elementwise kernels are counted as for vanilla, in half precision; a row that is not compiled, hf's
and `half` have other kernels, and no expectation of these. A row that computes something twice has no
expectation at all. bench.py --profile prints both; a class that is far from its expectation is where
to look.
"""

import re

import torch

from tables import markdown_table

# The class of a kernel (on a CPU: of an operator) is that of the first pattern in its name. Compiled
# kernels are named after everything that is fused into them, attention too, so they come first.
CLASSES = (
    ('elementwise', r'^triton_(?!tem_)'),
    ('attention', r'flash|fmha|sdpa|scaled_dot_product'),
    ('optimizer', r'multi_tensor_apply|adam|\bamp_|_amp_|_foreach_|vector_norm'),
    ('blocks', r'gemm|nvjet|cutlass|xmma|splitK|^triton_tem_|^aten::(mm|addmm|bmm)$'),
    (
        'elementwise',
        r'elementwise_kernel|reduce_kernel|softmax|norm|embedding|index|CatArray'
        r'|^aten::(_to_copy|copy|cat|add|sub|mul|div|neg|pow|exp_?$|silu|sum|logsumexp|gather|eq)',
    ),
)
# By name, products with the vocabulary are products like others: their shapes tell them apart.
NAMES = {
    'blocks': "products of the blocks' weights",
    'head': 'products with the vocabulary',
    'attention': 'attention',
    'elementwise': 'elementwise, norms, loss',
    'optimizer': 'optimizer',
    'other': 'other',
}

# Shares of the data sheet's FLOP/s and bytes/s that were assumed for an H200, in half precision.
REACHED = {'blocks': 0.58, 'head': 0.60, 'cudnn': 0.35, 'flash': 0.20, 'bytes': 0.77}

# Bytes that the compiled kernels read and write, as the compiler counts them (results/fakegpu): per
# token and layer so many for each channel and each FFN channel, per token for each logit. For each
# weight, those that clip its gradient and update it.
PER_CHANNEL = 106
PER_FFN_CHANNEL = 16
PER_LOGIT = 4
PER_WEIGHT = 48


def class_of(name):
    return next((kind for kind, pattern in CLASSES if re.search(pattern, name)), 'other')


def spent_by_class(trace, kind, vocab_size):
    """{class: microseconds} of a trace with shapes. kind: of the device, cuda or cpu."""
    spent = dict.fromkeys(NAMES, 0.0)
    for microseconds, event in kernels(trace, kind):
        spent[class_of(event.key)] += microseconds
    head = of_head(trace, kind, vocab_size)
    spent['head'] += head
    spent['blocks'] -= head
    return spent


def kernels(trace, kind):
    """[(microseconds, event)] of the kernels of a trace; on a CPU, of its operators."""
    wanted = torch.autograd.DeviceType.CUDA if kind == 'cuda' else torch.autograd.DeviceType.CPU
    # An annotation's time is that of its kernels, which would be counted twice.
    return [
        (own_time(event, kind), event)
        for event in trace.key_averages()
        if event.device_type == wanted and not event.is_user_annotation
    ]


def own_time(event, kind):
    """Microseconds of an event on the device, without the events in it."""
    return event.self_device_time_total if kind == 'cuda' else event.self_cpu_time_total


def of_head(trace, kind, vocab_size):
    """Microseconds of the products of which the vocabulary is a dimension.

    The operators on the CPU have shapes. A CUDA graph has no operators: 0.
    """
    total = 0.0
    for event in trace.key_averages(group_by_input_shape=True):
        is_operator = event.device_type == torch.autograd.DeviceType.CPU
        sizes = [size for shape in event.input_shapes for size in shape]
        if is_operator and class_of(event.key) == 'blocks' and vocab_size in sizes:
            total += own_time(event, kind)
    return total


def expected_by_class(model, micro_batch, micro_steps, machine, attention):
    """{class: microseconds} expected of a compiled step, from counted FLOPs and bytes, in half precision.

    model: a GPT, also on the meta device; micro_batch: its sequences of block_size tokens;
    attention: the name of its kernel. None for a class where a rate is unknown.
    """
    config = model.config
    T, C = config.block_size, config.n_embd
    tokens = micro_steps * micro_batch * T
    weights = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() >= 2)
    pairs = sum(len(block.attn.wiring.pairs) for block in model.transformer.h)

    # A product in the forward pass has two in the backward pass; causal attention's two, of which
    # half is masked, have five.
    flops = {
        'blocks': 6 * weights * tokens,
        'head': 6 * config.vocab_size * C * tokens,
        'attention': 7 * T * C * pairs * tokens,
    }
    per_layer = PER_CHANNEL * C + PER_FFN_CHANNEL * config.ffn_width
    moved = {
        'elementwise': tokens * (config.n_layer * per_layer + PER_LOGIT * config.vocab_size),
        'optimizer': PER_WEIGHT * model.num_params(False),
    }

    expected = dict.fromkeys(NAMES)
    for kind, count in flops.items():
        reached = REACHED.get(attention if kind == 'attention' else kind)
        expected[kind] = microseconds(count, reached, machine.peak_flops())
    for kind, count in moved.items():
        expected[kind] = microseconds(count, REACHED['bytes'], machine.peak_bytes())
    return expected


def microseconds(count, reached, peak):
    return 1e6 * count / (reached * peak) if reached and peak else None


def print_costliest(name, trace, kind):
    """The ten kernels of a trace that take the most time, and their share of all kernels' time."""
    events = sorted(kernels(trace, kind), key=lambda pair: -pair[0])
    total = sum(spent for spent, _ in events)

    rows = []
    for spent, event in events[:10]:
        share = spent / total
        rows.append(
            [f'`{event.key[:90]}`', f'{spent / 1e3:,.1f}', f'{share:.1%}', str(event.count)]
        )
    print('\n' + markdown_table([f'{name}: kernel', 'ms', 'share', 'calls'], rows))


def print_classes(name, spent, expected):
    """The time of each class of kernels, and what was expected: {class: microseconds} each."""
    total = sum(spent.values())
    known = None
    if all(expected[kind] is not None for kind in NAMES if kind != 'other'):
        known = sum(filter(None, expected.values()))

    rows = []
    for kind, words in NAMES.items():
        cells = [words, f'{spent[kind] / 1e3:,.1f}', f'{spent[kind] / total:.1%}']
        rows.append(cells + expectation(expected[kind], known))
    rows.append(['all', f'{total / 1e3:,.1f}', '100.0%', *expectation(known, known)])
    head = [f'{name}: kernels', 'ms', 'share', 'expected ms', 'expected share']
    print('\n' + markdown_table(head, rows))
    print(
        'expected: counts divided by rates that were assumed before any GPU was seen, no measurement'
    )


def expectation(value, total):
    if value is None:
        return ['n/a', 'n/a']
    return [f'{value / 1e3:,.1f}', f'{value / total:.1%}' if total else 'n/a']
