"""
Is my port right? A kit for other implementations of these models, which names the mistake.

$ python -m hub.conform mypackage.mymodel:build                         # every variant that it takes
$ python -m hub.conform mypackage.mymodel:build --variant=resformer,svformer
$ python -m hub.conform --variant=resformer               # its settings, names and shapes of weights

A port connects your model to the kit. The kit gives it ids and weights, and compares what it computes
with the numbers of a float64 reference: for each variant a model of width 16, 4 layers and 31 ids,
with weights from a formula. The kit needs NumPy and whatever the port needs. The status is 0 if all
checks pass, else 1. What a port does not give is "not checked".

A port is a function or a class of one of two kinds. It takes and returns NumPy arrays, in fp32 or
better. With a line like `variants = 'resformer,svformer'` in a class, or `build.variants = '...'` below
a function, it says which variants it has; without one it is asked for all.

A whole model, of two arguments (some 50 lines with everything that is optional, 10 without):

    class Build:
        variants = 'vanilla,resformer'       # optional

        def __init__(self, config, weights):
            # config: the settings above (config.n_layer, .norm_eps, ...); weights: {name: array}.
            # NotImplementedError, too, says that the port does not have a variant.
            self.model = MyModel(width=config.n_embd, ...)
            self.model.load(embedding=weights['transformer.wte.weight'], ...)

        def __call__(self, ids):             # (B, T) int64 -> logits (B, T, vocab_size)
            return self.model(torch.tensor(ids)).detach().numpy()

        # optional, each of them:
        def values(self, ids):               # a list: what each layer attends with, after mixing,
            return [...]                     # (B, n_kv_head, T, head size) each

        def gradients(self, ids, targets):   # of the mean cross entropy; targets (B, T)
            ...                              # {name of a weight: like the weight}. A name left out is
            return {'lm_head.weight': ...}   # not checked; None is no gradient

        def decode(self, chunks):            # a list of ids (B, t), one text cut into pieces
            cache = self.model.new_cache()   # -> logits (B, T, vocab_size), joined, and how many
            ...                              # numbers (elements, not bytes) the cache then holds of
            return logits, numbers           # keys and values, without room to spare; None: not checked

`build` may also be a function that returns a function of ids, which is all that must be there. Each is
called several times, with other ids between: a model may keep nothing from one call to the next.

A layer has no proj of what it borrows, and no v.proj if its own values have weight 0. Linear weights are
(out, in); c_gate is the one that SiLU follows. RoPE rotates halves. The kit counts layers from 1; names
of weights count them from 0.

A mixing, of four arguments, for projects whose blocks differ (20 to 40 lines):

    def mix(own, source, x, weights):
        # own, source (B, n_kv_head, T, head size): the values of a layer and what is mixed into them,
        # V_1 or a row of a table; x (B, T, C): the layer's normed input, which gates read.
        # weights, by the names of model.py's parameters without the layer, such as 'attn.v.gate.weight';
        # 'attn.v.residual_lambda' holds the weights (source, own) also where they are constant.
        s, o = weights['attn.v.residual_lambda']
        values = o * own + s * source        # like own

        def backward(g):                     # the gradients that follow from the values' gradient g
            return {'own': o * g, 'source': s * g,
                    'attn.v.residual_lambda': np.array([(g * source).sum(), (g * own).sum()])}

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

from configurator import choose
from lib.files import first_line, one_line_errors

# Made by tests/make_conform.py, which says what is in it.
FIXTURE = Path(__file__).with_name('conform.npz')
TOLERANCE = 1e-4  # of a tensor's largest entry

B, T = 2, 10
# How many tokens are decoded at a time: a length that returns is at another place.
CHUNKS = 3, 1, 1, 4, 1
LEVELS = {2: 'model', 4: 'mixing'}  # by the number of a port's arguments
# The settings of a variant that are shown whatever they are.
ALWAYS = 'n_layer n_head n_kv_head n_embd n_inner vocab_size block_size norm_eps rope_theta'.split()


@dataclass
class Settings:
    port: tuple = ()  # the port, as module:function; none: the settings and weights of the variants
    variant: str = ''  # names with commas between them; '': all


def formula(name, shape):
    """The array of a name, in float64: random numbers from -1/2 to 1/2, around 1 in a vector."""
    numbers = np.random.RandomState(zlib.crc32(name.encode())).random_sample(shape) - 0.5
    return numbers + 1 if len(shape) == 1 else numbers


def text(name, vocab_size):
    """Ids (B, T) of a name."""
    return ((formula(name, (B, T)) + 0.5) * vocab_size).astype(np.int64)


@dataclass
class Case:
    """What a variant gives at one level, and what each mistake gives."""

    config: SimpleNamespace  # GPTConfig's fields
    weights: dict  # {name: array}
    # {check: array}, in the order in which a mistake spreads. NaN: this number is not compared.
    expected: dict
    # {mistake, or another variant: {check: some_numbers()} of what it gives otherwise}
    mistakes: dict


def read_fixture():
    """{level: {variant: Case}}"""
    with np.load(FIXTURE) as file:
        arrays = dict(file)
    levels = {}
    for level, index in json.loads(arrays['index'].item()).items():
        cases = {name: read_case(case, arrays[f'{level}/{name}']) for name, case in index.items()}
        samples = {
            name: {check: some_numbers(array) for check, array in case.expected.items()}
            for name, case in cases.items()
        }
        for case in cases.values():
            case.mistakes |= samples  # in a port of one variant, another one is a mistake
        levels[level] = cases
    return levels


def read_case(case, numbers):
    """A Case of what the index says of it, and of its numbers: of each check, then of each mistake."""
    numbers = iter(np.split(numbers, np.cumsum(case['sizes'])[:-1]))
    expected = {check: restore(next(numbers), shape) for check, shape in case['checks'].items()}
    mistakes = {
        mistake: {check: next(numbers) for check in checks}
        for mistake, checks in case['mistakes'].items()
    }
    weights = {name: formula(name, shape) for name, shape in case['weights'].items()}
    if case['constant']:
        weights['attn.v.residual_lambda'] = np.array(case['constant'], dtype=float)
    return Case(SimpleNamespace(**case['config']), weights, expected, mistakes)


def places(size, count=16):
    """Where `count` entries of an array are, from its first to its last."""
    return np.linspace(0, size - 1, min(count, size)).astype(int)


def some_numbers(array):
    """Some numbers of an array, by which it is recognized."""
    return array.ravel()[places(array.size)]


def restore(numbers, shape):
    """The array of all its numbers, or of its sample: NaN elsewhere."""
    array = np.full(shape, np.nan)
    array.flat[places(array.size, len(numbers))] = numbers
    return array


# --- what a port gives ----------------------------------------------------------------------------


# A call is a word: formula() makes other inputs of each.


def observe_model(build, config, weights, *calls):
    """Yield (check, array) for all that a port of a whole model gives in each call, its logits first."""
    model = build(config, dict(weights))
    for call in calls:
        ids, targets = (text(call + name, config.vocab_size) for name in ('ids', 'targets'))
        yield 'logits', model(ids)
        if hasattr(model, 'values'):
            for n, t in enumerate(model.values(ids), 1):
                yield f'values of layer {n}', t
        if hasattr(model, 'gradients'):
            for name, gradient in model.gradients(ids, targets).items():
                yield f'gradient of {name}', gradient
        if hasattr(model, 'decode'):
            logits, numbers = model.decode(np.split(ids, np.cumsum(CHUNKS)[:-1], axis=1))
            yield 'logits decoded with a cache', logits
            if numbers is not None:
                yield 'numbers in the cache', numbers


def observe_mixing(mix, config, weights, *calls):
    """Yield (check, array) for all that a port of a mixing gives in each call, the values first."""
    shape = B, config.n_kv_head, T, config.n_embd // config.n_head
    for call in calls:
        own, source, g = (formula(call + name, shape) for name in ('own', 'source', 'gradient'))
        x = formula(f'{call}x', (B, T, config.n_embd))
        result = mix(own, source, x, dict(weights))
        values, backward = result if isinstance(result, tuple) else (result, None)
        yield 'values', values
        if backward:
            for name, gradient in backward(g).items():
                yield f'gradient of {name}', gradient


OBSERVE = {'model': observe_model, 'mixing': observe_mixing}

# --- the mistakes ---------------------------------------------------------------------------------

# What the fixture has numbers of: "which is what ... gives". Other variants are there by their names.
MISTAKES = {
    'unmixed': 'no mixing at all',
    'summed': 'mixing with weights (1, 1)',
    'divided': "a division by the layer's number",
    'normalized': 'a division by the sum of the weights',
    'previous': 'mixing from the previous layer (right: layer 1)',
    'detached': 'a detached V_1 (or other values of an earlier layer)',
    'keys detached': 'a detached K_1 (or other keys of an earlier layer)',
    'queries detached': 'a detached Q_1 (or other queries of an earlier layer)',
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
    error = np.abs(got - wanted)[~np.isnan(wanted)]
    return np.all(error <= TOLERANCE * scale)


def passes(got, right):
    return got.shape == right.shape and is_close(got, right, scale_of(right))


def find_mistakes(case, seen, failing):
    """{mistake: the failing checks that it explains}: of those that show in the first failing check
    first, whichever explain most."""
    candidates = {}
    for mistake, numbers in case.mistakes.items():
        shown = [check for check in seen if check in numbers and shows(case, check, numbers[check])]
        explained = [c for c in failing if c in shown and gives(case, c, numbers[c], seen[c])]
        if shown[:1] == explained[:1] == failing[:1]:
            candidates[mistake] = explained
    most = max(map(len, candidates.values()), default=0)
    best = {m: checks for m, checks in candidates.items() if len(checks) == most}
    return {m: checks for m, checks in best.items() if m in MISTAKES} or best


def shows(case, check, wrong):
    """Whether a sample is not that of the right numbers. (Another variant may have other shapes.)"""
    right = some_numbers(case.expected[check])
    return wrong.shape == right.shape and not is_close(wrong, right, scale_of(right, wrong))


def gives(case, check, wrong, got):
    right = case.expected[check]
    return got.shape == right.shape and is_close(
        some_numbers(got), wrong, scale_of(some_numbers(right), wrong)
    )


def scale_of(*arrays):
    return sum(np.nanmax(np.abs(array)) for array in arrays)


def explain(case, seen, failing, check):
    """What a port got wrong at the first check that fails, in words; '' where it is unknown."""
    got, right = seen[check], case.expected[check]
    if got.shape != right.shape:
        return 'so that nothing in it was compared'
    if check == 'numbers in the cache':
        return explain_cache(case.config, got, right)
    if check == 'logits decoded with a cache' and 'logits' not in failing:
        return 'unlike the same model without its cache'
    known = ~np.isnan(right)
    factor = (got * right)[known].sum() / (right**2)[known].sum()
    if not is_close(got, factor * right, scale_of(right)):
        return ''
    if not factor and check.startswith('gradient'):
        return 'which is no gradient at all'
    return f'which is {factor:.4g} times what is right'


def explain_cache(config, got, right):
    layer = B * T * config.n_kv_head * config.n_embd // config.n_head  # one layer's keys, or values
    borrowed = 'a cache where none is needed: what a layer borrows has no entry of its own'
    repeated = 'keys and values repeated for each query head (right: once for each KV head)'
    causes = {
        borrowed: 2 * config.n_layer * layer,
        repeated: right * config.n_head // config.n_kv_head,
        "one layer's keys or values too many: is V_1 kept twice?": right + layer,
        'bytes of fp32 (right: how many numbers)': 4 * right,
        'bytes of fp64 (right: how many numbers)': 8 * right,
    }
    found = [words for words, numbers in causes.items() if got == numbers]
    return f'which is {", or ".join(found)}' if found else ''


def unknown(case, seen, check):
    """What to say of the first check that fails, if nothing explains it."""
    words = ['unknown']
    right = case.expected[check]
    if is_close(seen[check], right, 100 * scale_of(right)):
        words.append('it is close: is it computed in less than fp32, or with another constant?')
    before = list(seen)[: list(seen).index(check)]
    # The values of a borrower say nothing of the layers before it.
    fresh = [c for c in before if not np.array_equal(case.expected[c], case.expected[before[0]])]
    if before:
        words.append(f'all is right up to {(before[:1] + fresh)[-1]}')
    elif check == 'logits':
        words.append('values() of the port would tell the layer')
    return '; '.join(words)


def unread(observe, port, case):
    """What to say of the weights that a port does not read: nothing follows from a change."""
    _, before = next(observe(port, case.config, case.weights, ''))
    before = np.array(before)
    names = []
    for name, weight in case.weights.items():
        # Not a multiple: what divides the weights by their sum reads them.
        other = formula(f'other {name}', weight.shape)
        _, after = next(observe(port, case.config, case.weights | {name: other}, ''))
        if np.array_equal(before, after):
            names.append(name)
    more = f' and {len(names) - 4} more' if len(names) > 4 else ''
    return f'nothing reads {", ".join(names[:4])}{more}' if names else ''


# --- the report -----------------------------------------------------------------------------------


def check_port(observe, port, name, case):
    """Print what a variant's checks say. Returns how many fail, None if the port does not have it."""
    try:
        after_another = collect(observe, port, case, 'other ', '')
        alone = collect(observe, port, case, '')
    except NotImplementedError:
        return None
    seen, failing = {}, []
    for check, right in case.expected.items():
        if check not in alone:
            continue
        given = after_another if passes(alone[check], right) else alone
        seen[check] = given[check]
        if not passes(seen[check], right):
            failing.append(check)
    print_summary(name, case, alone, seen, failing)
    if failing:
        explain_failure(observe, port, case, alone, seen, failing)
    return len(failing)


def collect(observe, port, case, *calls):
    """{check: what the last of these calls gave}. It is copied: the next call may write to the same memory."""
    given = {}
    for check, t in observe(port, case.config, case.weights, *calls):
        if t is None:  # no gradient
            t = np.zeros_like(case.expected.get(check, 0))
        given[check] = np.array(t, dtype=float)
    return given


def print_summary(name, case, given, seen, failing):
    count = len(failing) or len(seen)
    verb = 'fail' if failing else 'pass'
    if count == 1:
        verb += 's' if failing else 'es'
    line = f'{name}: {count} of {len(seen)} checks {verb}'
    missing = [check for check in case.expected if check not in seen]
    if missing:
        line += f'; not checked: {names_of(missing, case)}'
    unknown = [c for c in given if c not in case.expected]
    if unknown:
        line += f'; given by the port, but unknown here: {names_of(unknown, case)}'
    print(line)


def explain_failure(observe, port, case, alone, seen, failing):
    """Print the first check that fails, why, and the others."""
    check = failing[0]
    is_right_alone = passes(alone[check], case.expected[check])
    # Many variants' caches have the same size.
    is_said = is_right_alone or check == 'numbers in the cache'
    found = {} if is_said else find_mistakes(case, seen, failing)
    if is_right_alone:
        words = 'but right without an earlier call: something is kept from one call to the next'
    elif found:
        names = [MISTAKES.get(mistake, mistake) for mistake in found]
        words = f'which is what {", or ".join(names)} gives'
    else:
        words = explain(case, seen, failing, check)
    # A mistake that was written down says enough. Another variant's numbers may come of a weight that
    # nothing reads.
    if not (is_said or found.keys() & MISTAKES.keys()):
        words = '; '.join(filter(None, [words, unread(observe, port, case)]))
    words = words or unknown(case, seen, check)
    print(f'  {check}{how_it_differs(seen[check], case.expected[check])}, {words}')
    likewise = [c for c in failing[1:] if any(c in checks for checks in found.values())]
    others = [c for c in failing[1:] if c not in likewise]
    if likewise:
        print(f'    likewise {names_of(likewise, case)}')
    if others:
        print(f'    also wrong: {names_of(others, case)}')


def names_of(checks, case):
    """Checks with commas between them; the gradients of many weights by their number."""
    weights = [c for c in checks if c.removeprefix('gradient of ') in case.weights]
    if len(weights) > 4:
        others = [c for c in checks if c not in weights]
        checks = [*others, f'the gradients of {len(weights)} weights']
    return ', '.join(checks)


def how_it_differs(got, right):
    """Where a port's array differs most, and how."""
    if got.shape != right.shape:
        return f': expected shape {right.shape}, got {got.shape}'
    error = np.where(np.isnan(right), -1, np.nan_to_num(np.abs(got - right), nan=np.inf))
    place = np.unravel_index(np.argmax(error), got.shape)
    where = f' at {[int(i) for i in place]}' if place else ''
    return f'{where}: expected {right[place]:.4g}, got {got[place]:.4g}'


def load_port(words):
    """The function or class that the command line names, and its level."""
    if len(words) != 1 or words[0].count(':') != 1:
        raise ValueError('name one port, as module:function; --help has an example')
    module, name = words[0].split(':')
    try:
        port = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, SystemExit) as error:
        raise ValueError(f'{words[0]}: {type(error).__name__}: {first_line(error)}') from error
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


def show_variants(cases, names):
    """Print the settings of variants, but for those that are off as in vanilla, and their weights."""
    if not names:
        raise ValueError(
            f'name a port, as module:function (see --help), or a --variant: {", ".join(cases)}'
        )
    usual = vars(cases['vanilla'].config)
    for name, case in choose_cases(cases, names).items():
        print(name)
        for setting, value in vars(case.config).items():
            if setting in ALWAYS or value != usual[setting]:
                print(f'  {setting} = {value!r}')
        for weight, array in case.weights.items():
            print(f'  {weight} {array.shape}')


def main():
    with one_line_errors():
        _, (settings,) = choose({'': (Settings,)}, __doc__, plain='port')
        sys.path.insert(0, '')
        levels = read_fixture()
        if not settings.port:
            show_variants(levels['model'], settings.variant)
            sys.exit(0)
        port, level = load_port(settings.port)
        cases = choose_cases(levels[level], settings.variant)
        taken = choose_cases(levels[level], getattr(port, 'variants', ''))
    results = {}
    for name, case in cases.items():
        try:
            results[name] = check_port(OBSERVE[level], port, name, case) if name in taken else None
        # Whatever it raises, and if it exits: the other variants are checked all the same.
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            print(f'{name}: fails, for the port raises an error: {type(error).__name__}')
            results[name] = 1
    missing = [name for name, failures in results.items() if failures is None]
    if missing:
        print(f'not checked, because the port does not have them: {", ".join(missing)}')
    # Where nothing was checked, nothing passed.
    is_right = len(missing) < len(results) and not any(results.values())
    sys.exit(0 if is_right else 1)


if __name__ == '__main__':
    main()
