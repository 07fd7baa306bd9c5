"""
Is my port right? A kit for other implementations of these models, which names the mistake.

$ python -m hub.conform mypackage.mymodel:build                         # every variant that it takes
$ python -m hub.conform mypackage.mymodel:build --variant=resformer,svformer

A port is compared with numbers of a float64 reference: a model of width 16, 4 layers and 31 ids for
each variant, with weights from a formula. This needs NumPy and whatever the port needs. The status is
0 if all checks pass, else 1. What a port does not give is "not checked". A port is a function or a
class of one of two kinds, and takes and returns NumPy arrays, in fp32 or better.

A whole model, of two arguments:

    class Build:
        def __init__(self, config, weights):
            # config.n_layer, .n_head, .n_kv_head, .n_embd, .n_inner, .v_residual, ...: GPTConfig's fields
            # in model.py. weights: {name: array}, by the names of model.py's parameters. Raise
            # NotImplementedError for a variant that the port does not have: it is not checked.
            self.model = MyModel(width=config.n_embd, ...)
            self.model.load(embedding=weights['transformer.wte.weight'], ...)

        def __call__(self, ids):             # (B, T) int64 -> logits (B, T, vocab_size)
            return self.model(torch.tensor(ids)).detach().numpy()

        # optional, each of them:
        def values(self, ids):               # a list: what each layer attends with, after mixing,
            return [...]                     # (B, n_kv_head, T, head size) each

        def gradients(self, ids, targets):   # of the mean cross entropy; targets (B, T)
            return {'transformer.h.0.attn.c_attn.weight': ...,      # rows: q, k, v
                    'transformer.h.1.attn.residual_lambda': ...}    # gates, tables and x0 likewise; a
                                             # name left out is not checked, None is no gradient

        def decode(self, chunks):            # a list of ids (B, t), one text cut into pieces
            cache = self.model.new_cache()   # -> logits (B, T, vocab_size), joined, and how many
            ...                              # numbers (elements, not bytes) the cache then holds of
            return logits, numbers           # keys and values, without room to spare; None: not checked

`build` may also be a function that returns a function of ids, which is all that must be there. The rows
of c_attn are q, k, v, of the heads that a layer projects: a layer has none for what it borrows. Linear
weights are (out, in); of c_fc the rows are gate, then up. RoPE rotates halves. The kit counts layers
from 1; names of weights count them from 0.

A mixing, of four arguments, for projects whose blocks differ:

    def mix(own, source, x, weights):
        # own, source (B, n_kv_head, T, head size): the values of a layer and what is mixed into them,
        # V_1 or a row of a table; x (B, T, C): the layer's normed input, which gates read.
        # weights, by the names of model.py's parameters without the layer, such as 'attn.gate.weight';
        # 'attn.residual_lambda' holds the weights (source, own) also where they are constant.
        s, o = weights['attn.residual_lambda']
        values = o * own + s * source        # like own

        def backward(g):                     # the gradients that follow from the values' gradient g
            return {'own': o * g, 'source': s * g,
                    'attn.residual_lambda': np.array([(g * source).sum(), (g * own).sum()])}

        return values, backward              # or the values alone
"""

import importlib
import inspect
import json
import sys
import traceback
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from configurator import choose, first_line, one_line_errors

# Made by tests/make_conform.py, which says what is in it.
FIXTURE = Path(__file__).parents[1] / 'tests/conform.npz'
TOLERANCE = 1e-4  # of a tensor's largest entry

B, T = 2, 10
CHUNKS = (4, 1, 3, 2)  # tokens that are decoded at a time
LEVELS = {2: 'model', 4: 'mixing'}  # by the number of a port's arguments


@dataclass
class Settings:
    port: tuple = ()  # the port, as module:function
    variant: str = ''  # names with commas between them, of which a wrong one lists all; '': all


def formula(name, shape):
    """The array of a name, in float64: random numbers from -1/2 to 1/2, around 1 in a vector."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape) - 0.5
    return numbers + 1 if len(shape) == 1 else numbers


def text(name, vocab_size):
    """Ids (B, T) of a name."""
    return np.floor((formula(name, (B, T)) + 0.5) * vocab_size).astype(np.int64)


@dataclass
class Case:
    """What a variant gives at one level, and what each mistake gives."""

    config: SimpleNamespace  # GPTConfig's fields
    weights: dict  # {name: array}
    expected: dict  # {check: array}, in the order in which a mistake spreads
    mistakes: dict  # {mistake: {check: sample()}}


def read_fixture(path=FIXTURE):
    """{level: {variant: Case}}"""
    with np.load(path) as file:
        arrays = dict(file)
    index = json.loads(str(arrays['index']))
    return {
        level: {
            name: read_case(case, arrays[f'{level}/{name}'], arrays[f'{level}/{name}/mistakes'])
            for name, case in cases.items()
        }
        for level, cases in index.items()
    }


def read_case(case, numbers, rows):
    sizes = [int(np.prod(shape)) for shape in case['checks'].values()]
    parts = np.split(numbers, np.cumsum(sizes)[:-1])
    expected = {
        check: part.reshape(shape)
        for (check, shape), part in zip(case['checks'].items(), parts, strict=True)
    }
    samples = np.cumsum([len(sample(part)) for part in parts])[:-1]
    mistakes = {
        mistake: dict(zip(expected, np.split(row, samples), strict=True))
        for mistake, row in zip(case['mistakes'], rows, strict=True)
    }
    weights = {name: formula(name, shape) for name, shape in case['weights'].items()}
    if case['constant']:
        weights['attn.residual_lambda'] = np.array(case['constant'], dtype=float)
    return Case(SimpleNamespace(**case['config']), weights, expected, mistakes)


def sample(array, count=16):
    """At most `count` numbers of an array, by which a mistake is recognized."""
    places = np.linspace(0, array.size - 1, min(count, array.size)).astype(int)
    return array.ravel()[places]


# --- what a port gives ----------------------------------------------------------------------------


def observe_model(build, config, weights):
    """Yield (check, array) for all that a port of a whole model gives, its logits first."""
    ids, targets = text('ids', config.vocab_size), text('targets', config.vocab_size)
    model = build(config, dict(weights))
    yield 'logits', model(ids)
    if hasattr(model, 'values'):
        for n, t in enumerate(model.values(ids), 1):
            yield f'values of layer {n}', t
    if hasattr(model, 'gradients'):
        values = config.n_kv_head * config.n_embd // config.n_head  # rows of W_V, the last ones
        for name, gradient in model.gradients(ids, targets).items():
            yield f'gradient of {name}', gradient
            if name == 'transformer.h.0.attn.c_attn.weight' and gradient is not None:
                yield "gradient of layer 1's W_K", gradient[-2 * values : -values]
                yield "gradient of layer 1's W_V", gradient[-values:]
    if hasattr(model, 'decode'):
        logits, numbers = model.decode(np.split(ids, np.cumsum(CHUNKS)[:-1], axis=1))
        yield 'logits decoded with a cache', logits
        if numbers is not None:
            yield 'numbers in the cache', numbers


def observe_mixing(mix, config, weights):
    """Yield (check, array) for all that a port of a mixing gives, the values first."""
    shape = B, config.n_kv_head, T, config.n_embd // config.n_head
    x = formula('x', (B, T, config.n_embd))
    result = mix(formula('own', shape), formula('source', shape), x, dict(weights))
    values, backward = result if isinstance(result, tuple) else (result, None)
    yield 'values', values
    if backward:
        for name, gradient in backward(formula('gradient', shape)).items():
            yield f'gradient of {name}', gradient


OBSERVE = {'model': observe_model, 'mixing': observe_mixing}

# --- the mistakes ---------------------------------------------------------------------------------

# What the fixture has numbers of: "which is what ... gives".
MISTAKES = {
    'detached': 'a detached V_1 (or other values of an earlier layer)',
    'keys detached': 'a detached K_1 (or other keys of an earlier layer)',
    'swapped': 'swapping the weights of source and own value',
    'own weighted': "weighting the own value with the source's weight or gate",
    'mixed after RoPE': 'mixing a source as projected into keys after RoPE',
    'mixed after the cache': 'mixing after the cache (which then holds unmixed values or keys)',
    'source mixed': "reading a source after the source's own mixing",
    'overwritten': 'overwriting a tensor of an earlier layer (by the mixture, or by a borrower that '
    'rotates keys again)',
    'KV order': 'expanding KV heads in the wrong order (right: query head h reads h // group)',
    'NeuTRENO': "NeuTRENO on a layer's projected values (right: those that it attends with)",
    'RoPE offset': "a borrower's RoPE that starts at 0 with each call",
    'gate sign': "a gate's flipped sign",
    'gate stream': "a gate that reads the stream before the block's norm",
    'gate channels': 'a gate that reads the last channels (right: the first)',
}


def is_close(got, wanted, scale):
    return bool(np.all(np.abs(got - wanted) <= TOLERANCE * scale))


def passes(got, right):
    return got.shape == right.shape and is_close(got, right, np.abs(right).max())


def gives(case, mistake, check, got):
    """Whether a mistake gives what a port got at a check, and this is not right."""
    right, wrong = sample(case.expected[check]), case.mistakes[mistake][check]
    scale = np.abs(right).max() + np.abs(wrong).max()
    if got.shape != case.expected[check].shape or is_close(wrong, right, scale):
        return False
    return is_close(sample(got), wrong, scale)


def explain(case, seen, failing, check):
    """What a port got wrong at a check, in words; '' where it is unknown."""
    some = [m for m in case.mistakes if gives(case, m, check, seen[check])]
    # Those that explain whatever fails, if there are any.
    whole = [m for m in some if all(gives(case, m, other, seen[other]) for other in failing)]
    if some:
        return 'which is what ' + ', or '.join(MISTAKES[m] for m in whole or some) + ' gives'
    got, right = seen[check], case.expected[check]
    if got.shape != right.shape:
        return 'so that nothing in it was compared'
    if check.startswith('gradient') and not got.any():
        return 'which is no gradient at all'
    if check == 'numbers in the cache' and got > right:
        config = case.config
        width = config.n_kv_head * config.n_embd // config.n_head
        if got > 2 * config.n_layer * width * B * T:
            return "more than vanilla's: bytes, or room to spare?"
        return 'which is a cache where none is needed: what a layer borrows has no entry of its own'
    if check == 'logits decoded with a cache' and 'logits' not in failing:
        return 'unlike the same model without its cache'
    return ''


def unknown(observe, port, case, seen, check):
    """What to say of the first check that fails, if no mistake explains it."""
    names = unread(observe, port, case)
    reads = f'nothing reads {", ".join(names)}'
    if any(f'gradient of {name}' in case.expected for name in names):
        return reads
    words = ['unknown']
    right = case.expected[check]
    if np.allclose(seen[check], right, rtol=0, atol=0.01 * np.abs(right).max()):
        words.append('it is close: is it computed in less than fp32, or with another constant?')
    before = list(seen)[: list(seen).index(check)]
    # The values of a borrower say nothing of the layers before it.
    fresh = [c for c in before if not np.array_equal(case.expected[c], case.expected[before[0]])]
    if before:
        words.append(f'all is right up to {(before[:1] + fresh)[-1]}')
    elif check == 'logits':
        words.append('values() of the port would tell the layer')
    if names:
        words.append(reads)
    return '; '.join(words)


def unread(observe, port, case):
    """The names of the weights that a port does not read: nothing follows from a change."""
    _, before = next(observe(port, case.config, case.weights))
    names = []
    for name, weight in case.weights.items():
        _, after = next(observe(port, case.config, case.weights | {name: -weight / 2}))
        if np.array_equal(before, after):
            names.append(name)
    return names


# --- the report -----------------------------------------------------------------------------------


def check_port(observe, port, name, case):
    """Print what a variant's checks say. Returns how many fail, None if the port does not have it."""
    try:
        given = dict(observe(port, case.config, case.weights))
    except NotImplementedError:
        return None
    seen = {}
    for check, right in case.expected.items():
        if check in given:
            no_gradient = given[check] is None
            seen[check] = np.zeros_like(right) if no_gradient else np.asarray(given[check], float)
    checks = list(seen)
    failing = [check for check in checks if not passes(seen[check], case.expected[check])]
    missing = [check for check in case.expected if check not in seen]
    count = len(failing) or len(checks)
    verb = 'fails' if failing else 'passes'
    if count > 1:
        verb = 'fail' if failing else 'pass'
    also = f'; not checked: {", ".join(missing)}' if missing else ''
    print(f'{name}: {count} of {len(checks)} checks {verb}{also}')

    groups = {}
    for check in failing:
        groups.setdefault(explain(case, seen, failing, check), []).append(check)
    for words, (check, *others) in groups.items():
        if not words and check == failing[0]:
            words = unknown(observe, port, case, seen, check)
        words = words or 'unknown, or it follows from the above'
        print(f'  {check}{difference(seen[check], case.expected[check])}, {words}')
        if others:
            print(f'    likewise {", ".join(others)}')
    return len(failing)


def difference(got, right):
    """Where a port's array differs most, and how."""
    if got.shape != right.shape:
        return f': expected shape {right.shape}, got {got.shape}'
    place = np.unravel_index(np.argmax(np.nan_to_num(np.abs(got - right), nan=np.inf)), got.shape)
    where = f' at {[int(i) for i in place]}' if place else ''
    return f'{where}: expected {right[place]:.4g}, got {got[place]:.4g}'


def load_port(words):
    """The function or class that the command line names, and its level."""
    if len(words) != 1 or words[0].count(':') != 1:
        raise ValueError('name one port, as module:function; --help has an example')
    module, name = words[0].split(':')
    try:
        port = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f'{words[0]}: {first_line(error)}') from error
    level = callable(port) and LEVELS.get(len(inspect.signature(port).parameters))
    if not level:
        raise ValueError(
            f'{words[0]} must be a function or class that takes config and weights, or own, source, x '
            'and weights; see --help'
        )
    return port, level


def choose_cases(cases, names):
    """{variant: Case} of names with commas between them; '': all."""
    chosen = names.split(',') if names else list(cases)
    for name in chosen:
        if name not in cases:
            raise ValueError(f'variant {name!r} is none of {", ".join(cases)}')
    return {name: cases[name] for name in chosen}


def main():
    with one_line_errors():
        _, (settings,) = choose({'': (Settings,)}, __doc__, plain='port')
        sys.path.insert(0, '')
        port, level = load_port(settings.port)
        cases = choose_cases(read_fixture()[level], settings.variant)
    results = {}
    for name, case in cases.items():
        try:
            results[name] = check_port(OBSERVE[level], port, name, case)
        except Exception:  # whatever it raises: the other variants are checked all the same
            traceback.print_exc()
            print(f'{name}: fails, for the port raises an error')
            results[name] = 1
    missing = [name for name, failures in results.items() if failures is None]
    if missing:
        print(f'not checked, because the port does not have them: {", ".join(missing)}')
    # Where nothing was checked, nothing passed.
    is_right = len(missing) < len(results) and not any(results.values())
    sys.exit(0 if is_right else 1)


if __name__ == '__main__':
    main()
