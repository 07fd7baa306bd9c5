"""
What is compared, as text: arms, `vanilla; mine: v_residual=True`, and contrasts, `mine-vanilla`.

An arm is a name and the settings in which it differs from what all arms share, and perhaps
`seed_offset`, which is added to its test seeds: the same model under other seeds is an arm, too. It may
name config files, whose settings its own replace. Of a file, the wiring counts (every field of GPTConfig
but the shape), and so do settings of training that are not train.py's defaults, so that
`resformer: config/resformer_82m.py` is a ResFormer of the given size, schedule and data, and
`modern: config/modern_82m.py` is trained with Muon.
"""

import contextlib
import itertools
import re
from dataclasses import dataclass

from configurator import check_key, configure, hints_of, read_settings

from comparison.runs import default_settings
from model import GPTConfig
from train import TrainConfig

# Settings that compare.py itself chooses.
CHOSEN = {'seed', 'out_dir', 'init_from'}

# --- arms -----------------------------------------------------------------------------------------


@dataclass
class ArmPlan:
    """An arm's settings, to which those of each run are added."""

    training: TrainConfig
    config: GPTConfig
    seed_offset: int
    own: dict  # {setting: value} of its own, as text or not
    named: set  # settings that the arm or the command line names

    @classmethod
    def of(cls, own, common, files):
        """From {setting: value} of the arm, and of all arms on top of config files."""
        own = dict(own)
        offset = take_offset(own)
        settings = common | own
        flags = [f'--{name}={value}' for name, value in settings.items()]
        training, config = configure(TrainConfig, GPTConfig, argv=[*files, *flags])
        return cls(training, config, offset, own, set(settings))


def parse_arms(text):
    """{name: {setting: its text}} of --arms. Raises ValueError if it cannot be read."""
    # A comma inside a value, as in residual_lambda=(5.0, 1.0), is followed by no name.
    comma = re.search(r',\s*([\w.+/-]+\s*[:=]|\S+\.py)', text)
    if comma:
        raise ValueError(
            f'arms: {comma[0]!r} begins with a comma; spaces separate settings, semicolons arms'
        )
    arms = {}
    for part in text.split(';'):
        if not part.strip():
            continue
        name, _, words = part.partition(':')
        name = name.strip()
        if name in arms:
            raise ValueError(f'arms: two arms are named {name}')
        of_files, own = {}, {}
        # A value may hold spaces: residual_lambda=(5.0, 1.0).
        for word in re.split(r'\s+(?=(?:--)?[a-z]\w*=|\S+\.py(?:\s|$))', words.strip()):
            key, equals, value = word.removeprefix('--').partition('=')
            if key in own:
                raise ValueError(f'arm {name}: {key} is given twice; drop one')
            if equals:
                own[key] = value
            elif word.endswith('.py'):
                of_files |= read_arm(word)
            elif word:
                raise ValueError(f'arm {name}: {word!r} is neither key=value nor a config file')
        arms[name] = of_files | own
    return arms


def read_arm(path):
    """{setting: value} of a config file that an arm names: what decides its numbers, without the shape and
    the defaults of training."""
    known = hints_of([TrainConfig, GPTConfig])
    settings = read_settings(path, known)
    for name in settings:
        check_key(name, known, path)
    defaults, own = default_settings(), {}
    names = defaults.keys() - GPTConfig().shape().keys() - CHOSEN
    for name, value in settings.items():
        # The baseline may have a field of the model on.
        if name in names and (hasattr(GPTConfig, name) or value != defaults[name]):
            own[name] = value
    return own


def parse_contrasts(text, arms):
    """[(ours, theirs)]: each arm against the first, and those of --contrasts, such as 'mine-resformer'.

    Ours and theirs are two arms or, as in '(a-b)-(c-d)', two leads: contrasts of arms that stand before.
    Each pair is there once.
    """
    baseline, *others = arms
    contrasts = [(name, baseline) for name in others]
    for word in filter(None, re.split(r'[\s,;]+', text)):
        leads = [lead(*pair) for pair in contrasts if pair[0] in arms]
        known = [*itertools.permutations(arms, 2), *itertools.permutations(leads, 2)]
        pairs = [pair for pair in known if contrast_name(*pair) == word]
        if len(pairs) != 1:
            raise ValueError(
                f'contrasts: {word!r} is A-B in {len(pairs)} ways, not in one, where A and B are two of '
                f'{", ".join(arms)}, or two of {", ".join(leads)}'
            )
        (pair,) = pairs
        if not {pair, pair[::-1]} & set(contrasts):
            contrasts.append(pair)
    return contrasts


def lead(ours, theirs):
    """The name of a contrast of two arms where another contrast is about it."""
    return f'({contrast_name(ours, theirs)})'


def contrast_name(ours, theirs):
    """The name of a contrast in --contrasts, plan.json and report.json."""
    return f'{ours}-{theirs}'


# --- mistakes -------------------------------------------------------------------------------------


def check_names(arms):
    """Refuse names of arms that cannot be told apart, or are none."""
    lower = {}
    for name in arms:
        check_name(name)
        other = lower.setdefault(name.lower(), name)
        if other != name:
            raise ValueError(
                f'arms {other} and {name} differ only in case: on some systems, their runs would '
                'share a folder'
            )


def check_name(name):
    """Refuse a name that a contrast, a folder or a picture cannot hold."""
    if not re.fullmatch(r'[^\W_][\w.+-]*', name):  # matplotlib hides a label like _this
        raise ValueError(
            f'arms: {name!r} is not a name; it has letters, digits and _ . + -, as in "vanilla; '
            'mine: v_residual=True", or in mine=FOLDER of a run that exists'
        )


def check_given(settings, where, tuned):
    """Refuse settings that compare.py itself chooses; tuned: whether it chooses the rates, too."""
    for key in CHOSEN & settings.keys():
        raise ValueError(f'{where}: {key} is chosen by compare.py; give --seeds, --name')
    if tuned and 'learning_rate' in settings:
        raise ValueError(f'{where}: learning_rate is tuned with --rates; drop one')


@contextlib.contextmanager
def of_arm(name):
    """Let a mistake say in which arm it is."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise type(error)(f'arm {name}: {error}') from error


def take_offset(settings):
    """The seed_offset of an arm, which its settings then lack."""
    offset = settings.pop('seed_offset', 0)
    if not str(offset).isdecimal():
        raise ValueError(
            f'seed_offset={offset} must be a whole number, which is added to every test seed'
        )
    return int(offset)
