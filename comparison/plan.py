"""
What a comparison will do, written down before its first result: arms, rates, seeds, and the test.

    plan = Plan(
        {'vanilla': {}, 'resformer': {'v_residual': True}},     # the first arm is the baseline
        'out/compare/mine',
        common={'dataset': 'stdlib', 'max_iters': 100},         # settings of all arms
        seeds=(1, 2, 3),
    )

An arm is a name and the settings in which it differs from what all arms share, and perhaps
`seed_offset`, which is added to its test seeds: the same model under other seeds is an arm, too. On
the command line, an arm may name config files. Only their wiring counts (every field of GPTConfig but
the shape), so that `resformer: config/resformer_82m.py` is a ResFormer of the given size, schedule and
data.

A run is (arm, rate, seed), trained by train.py in <folder>/<arm>_lr<rate>_seed<seed>. plan.json holds
everything that decides a result, the commit, the work tree's diff, and a hash of all. It does not change:
the same plan may get more seeds, and any other comparison is one of another name. Runs of different code
are of different comparisons, unless mixed_code is given.
"""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import re
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from comparison.runs import MIXED_CODE, ROUNDING, difference, differences, facts
from comparison.verdict import LEVEL, RULE
from configurator import check_key, configure, read_settings
from lib.data import Dataset
from lib.files import as_json, unreadable, write_json
from lib.rundir import code_fingerprint, commit_of, git
from model import GPTConfig
from train import TrainConfig, check_rates, share_of_micro_steps

# Settings that compare.py itself chooses.
CHOSEN = set('seed out_dir init_from eval_only'.split())
# How often and on how much a run is evaluated, unless somebody says otherwise: once, on everything.
EVALUATION = ('eval_iters', 'eval_interval')
# Facts that say of which text a validation loss is.
TEXT = ('dataset', 'block_size', 'eval_iters * batch_size')
# Facts that differ from run to run, from arm to arm, or from machine to machine.
VARYING = ('seed', 'learning_rate', 'resumed', *ROUNDING)

METRIC = 'validation loss at the end of training, mean over domains (nats per token)'


# --- arms -----------------------------------------------------------------------------------------


def parse_arms(text):
    """{name: {setting: its text}} of --arms. Raises ValueError if it cannot be read."""
    arms = {}
    for part in text.split(';'):
        if not part.strip():
            continue
        name, _, words = part.partition(':')
        name = name.strip()
        if name in arms:
            raise ValueError(f'arms: two arms are named {name}')
        arms[name] = {}
        # A value may hold spaces: residual_lambda=(5.0, 1.0).
        for word in re.split(r'\s+(?=(?:--)?[a-z]\w*=|\S+\.py(?:\s|$))', words.strip()):
            arms[name] |= parse_word(name, word.removeprefix('--')) if word else {}
    return arms


def parse_word(arm, word):
    """{setting: value} of a word of an arm: key=value, or a config file, of which the wiring counts."""
    key, equals, value = word.partition('=')
    if equals:
        return {key: value}
    if not word.endswith('.py'):
        raise ValueError(f'arm {arm}: {word!r} is neither key=value nor a config file')
    return read_wiring(word)


def read_wiring(path):
    """{field: value} of the fields of GPTConfig that a config file sets, without the shape.

    Its other settings are those of training, which all arms have in common.
    """
    known = {item.name for schema in (TrainConfig, GPTConfig) for item in fields(schema)}
    settings = read_settings(path, known)
    for name in settings:
        check_key(name, known, path)
    names = {item.name for item in fields(GPTConfig)} - GPTConfig().shape().keys()
    return {name: value for name, value in settings.items() if name in names}


def parse_contrasts(text, arms):
    """[(ours, theirs)]: each arm against the first, and those of --contrasts, such as 'mine-resformer'.

    Ours and theirs are two arms or, as in '(a-b)-(c-d)', two leads: contrasts of arms that stand before.
    """
    contrasts = all_contrasts(arms)
    for word in filter(None, re.split(r'[\s,;]+', text)):
        leads = [lead(*pair) for pair in contrasts if pair[0] in arms]
        known = [*itertools.permutations(arms, 2), *itertools.permutations(leads, 2)]
        pairs = [pair for pair in known if contrast_name(*pair) == word]
        if len(pairs) != 1:
            raise ValueError(
                f'contrasts: {word!r} is A-B in {len(pairs)} ways, not in one, where A and B are two of '
                f'{", ".join(arms)}, or two of {", ".join(leads)}'
            )
        contrasts = all_contrasts(arms, [*contrasts, *pairs])
    return contrasts


def lead(ours, theirs):
    """The name of a contrast of two arms where another contrast is about it."""
    return f'({contrast_name(ours, theirs)})'


def all_contrasts(arms, more=()):
    """[(ours, theirs)]: each arm against the first, then the others, each pair once."""
    baseline, *others = arms
    contrasts = [(name, baseline) for name in others]
    for ours, theirs in more:
        if not {(ours, theirs), (theirs, ours)} & set(contrasts):
            contrasts.append((ours, theirs))
    return contrasts


def contrast_name(ours, theirs):
    """The name of a contrast in --contrasts, plan.json and report.json."""
    return f'{ours}-{theirs}'


# --- runs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    arm: str
    rate: float
    seed: int

    @property
    def name(self):
        return f'{self.arm}_lr{self.rate:g}_seed{self.seed}'


class Plan:
    """A comparison's arms and runs.

    arms: {name: {setting: value}}. common: {setting: value} of all arms, on top of config `files`.
    seeds: of the test, or how many (5: 1 to 5). rates: learning rates that every arm tries on the
    tuning seeds; (): untuned. contrasts: of parse_contrasts(), besides each arm against the first.
    mixed_code: whether runs of different code may share a verdict.
    Values may be as text, too. Raises ValueError or OSError for everything that can be refused before training.
    """

    def __init__(
        self,
        arms,
        folder,
        common=None,
        files=(),
        seeds=5,
        rates=(),
        tuning_seeds=(101, 102),
        contrasts=(),
        mixed_code=False,
    ):
        self.folder = Path(folder)
        self.files, self.common = list(files), dict(common or {})
        if isinstance(seeds, int) and seeds > 1000:
            raise ValueError(
                f'seeds={seeds} is how many seeds; for this one, write --seeds=({seeds},)'
            )
        self.seeds = tuple(range(1, seeds + 1)) if isinstance(seeds, int) else tuple(seeds)
        self.rates = tuple(rates)
        self.tuning_seeds = tuple(tuning_seeds) if rates else ()
        self.check_numbers()
        self.rates = tuple(sorted(rates))
        self.check_names(arms)
        self.baseline = next(iter(arms))
        self.arms = {name: dict(settings) for name, settings in arms.items()}
        self.offsets = {name: take_offset(name, own) for name, own in self.arms.items()}
        self.contrasts = all_contrasts(arms, contrasts)
        self.mixed_code = mixed_code
        self.code = code_fingerprint()

        # The config files are read here alone: somebody may edit them while the runs are trained.
        self.settings, _ = self.configure({})
        self.own = {}
        for name, own in self.arms.items():
            with of_arm(name):
                self.own[name] = self.configure(own)
        self.check_arms()
        self.check_seeds()

    def configure(self, settings):
        """(TrainConfig, GPTConfig) of all arms' settings, and of some on top."""
        flags = [f'--{name}={value}' for name, value in (self.common | settings).items()]
        return configure(TrainConfig, GPTConfig, argv=[*self.files, *flags])

    # --- what is refused ---

    def check_numbers(self):
        for name, least, kind in (
            ('seeds', 0, int),
            ('tuning_seeds', 0, int),
            ('rates', 1e-12, float),
        ):
            values = getattr(self, name)
            kinds = {type(value) for value in values} - {int, kind}
            # The names of runs have six digits of a rate.
            if kinds or len({f'{x:g}' for x in values if x >= least}) < len(values):
                raise ValueError(f'{name}={values} must be different numbers, at least {least}')
        if not self.seeds:
            raise ValueError('seeds must be at least 1')
        if self.rates and not (len(self.rates) > 1 and self.tuning_seeds):
            raise ValueError(
                f'rates={self.rates} must be two or more, tried on --tuning_seeds; a single one is '
                '--learning_rate'
            )

    def check_names(self, arms):
        lower = {}
        for name, settings in arms.items():
            if not re.fullmatch(r'[^\W_][\w.+-]*', name):  # matplotlib hides a label like _this
                raise ValueError(
                    f'arms: {name!r} is not a name; write "vanilla; mine: v_residual=True neutreno=0.2"'
                )
            other = lower.setdefault(name.lower(), name)
            if other != name:
                raise ValueError(
                    f'arms {other} and {name} differ only in case: on some systems, their runs would '
                    'share a folder'
                )
            for keys, where in ((settings, f'arm {name}'), (self.common, 'the command line')):
                for key in CHOSEN & keys.keys():
                    raise ValueError(
                        f'{where}: {key} is chosen by compare.py; give --seeds, --name'
                    )
                if self.rates and 'learning_rate' in keys:
                    raise ValueError(f'{where}: learning_rate is tuned with --rates; drop one')

    def check_arms(self):
        """Refuse arms that are the same, and arms whose losses are those of different texts."""
        every = {name: self.facts(self.example(name)) for name in self.arms}
        for name, own in every.items():
            other = difference(own, every[self.baseline], only=TEXT)
            if other:
                key, value, expected = other
                raise ValueError(
                    f'arm {name}: {key}={value!r}, but {self.baseline} has {expected!r}: '
                    'their losses would be those of different texts'
                )
        for one, other in itertools.combinations(self.arms, 2):
            if self.offsets[one] == self.offsets[other] and every[one] == every[other]:
                raise ValueError(
                    f'arms {one} and {other} are the same run; to compare a model with itself, give '
                    f'one of them other seeds: "{other}: seed_offset=1000"'
                )

    def check_seeds(self):
        """Refuse a test seed that also chooses a learning rate, or that belongs to two pairs.

        The t test takes the differences of a contrast for independent of each other.
        """
        for name, offset in self.offsets.items():
            seeds = self.test_seeds(name)
            both = sorted(set(seeds) & set(self.tuning_seeds))
            if both:
                raise ValueError(
                    f'arm {name}: seeds {both} would both choose the rates and judge the arms; choose '
                    'other --tuning_seeds, or another seed_offset'
                )
            for other, other_offset in self.offsets.items():
                if offset != other_offset and set(seeds) & set(self.test_seeds(other)):
                    raise ValueError(
                        f'arms {name} and {other}: with seed_offset={offset} and {other_offset}, a '
                        'seed would belong to two pairs; put the offsets further apart than the seeds'
                    )

    def check_training(self, gpus):
        """Refuse what every training would refuse."""
        for name in self.arms:
            with of_arm(name):
                settings, config = self.configs(self.example(name))
                Dataset(settings.dataset)
                share_of_micro_steps(settings, gpus)
                check_rates(settings, config)

    # --- what train.py is told ---

    def test_seeds(self, arm):
        return [seed + self.offsets[arm] for seed in self.seeds]

    def own_rate(self, arm):
        """The learning rate of an arm that is not tuned."""
        settings, _ = self.own[arm]
        return settings.learning_rate

    def example(self, arm):
        """One of an arm's runs, to ask for what all of them have in common."""
        return Run(arm, self.own_rate(arm), 0)

    def chosen_settings(self, run):
        """{setting of TrainConfig: value} that compare.py chooses for a run."""
        # min_lr keeps the config's proportion, or the arm's, if it has a min_lr of its own.
        settings = self.own[run.arm][0] if 'min_lr' in self.arms[run.arm] else self.settings
        rate = settings.learning_rate
        least = run.rate * settings.min_lr / rate if rate else 0.0
        chosen = {
            'seed': run.seed,
            'learning_rate': float(f'{run.rate:.12g}'),
            'min_lr': float(f'{least:.12g}'),
        }
        for name in EVALUATION:
            if name not in self.common | self.arms[run.arm]:
                chosen[name] = 0
        return chosen | {'init_from': 'auto', 'out_dir': str(self.run_folder(run))}

    @property
    def replaced(self):
        """The eval_iters of the config that chosen_settings() replaces by 0; None where it does not."""
        return None if 'eval_iters' in self.common else self.settings.eval_iters

    def arguments(self, run):
        """The arguments of train.py for a run."""
        settings = self.common | self.arms[run.arm] | self.chosen_settings(run)
        return self.files + [f'--{name}={value}' for name, value in settings.items()]

    def configs(self, run):
        """(TrainConfig, GPTConfig) of a run."""
        training, config = self.own[run.arm]
        return replace(training, **self.chosen_settings(run)), config

    def facts(self, run):
        """The facts that a run must have: see comparison/runs.py."""
        training, config = self.configs(run)
        recorded = {'data': self.data, 'code': self.code}
        return facts(asdict(training) | asdict(config) | recorded)

    def ignored(self, arm):
        """Names of facts in which an arm's runs may differ from facts().

        How a run rounds is the machine's choice, unless it is what the arm is about.
        """
        chosen = self.arms[arm]
        ignored = [name for name in ROUNDING if str(chosen.get(name, 'auto')) == 'auto']
        return ignored + ['code'] * self.mixed_code

    @functools.cached_property
    def data(self):
        """The fingerprint of the data of all arms; None where they are not: runs may be trained
        elsewhere."""
        with contextlib.suppress(ValueError, OSError):
            return Dataset(self.settings.dataset).fingerprint()

    def run_folder(self, run):
        return self.folder / run.name

    # --- plan.json ---

    def contents(self):
        """What decides the results, as JSON."""
        base = self.facts(self.example(self.baseline))
        arms = {}
        for name, offset in self.offsets.items():
            own = self.facts(self.example(name))
            rate = None if self.rates else self.own_rate(name)
            arms[name] = {'differs': changes(own, base), 'rate': rate, 'seed_offset': offset}
        return as_json(
            {
                'metric': METRIC,
                'baseline': self.baseline,
                'arms': arms,
                'contrasts': [contrast_name(*pair) for pair in self.contrasts],
                'seeds': self.seeds,
                'rates': self.rates,
                'tuning_seeds': self.tuning_seeds,
                'level': LEVEL,
                'rule': RULE,
                'settings': {name: base[name] for name in base if name not in VARYING},
            }
        )

    def write(self):
        """Write plan.json, or read it where the same plan is there. Returns what it holds.

        Raises ValueError where it is another plan, damaged or edited. More seeds are the same plan: it says
        how many there were before.
        """
        path = self.folder / 'plan.json'
        contents, earlier = self.contents(), []
        if path.exists():
            old = read_plan(path)
            but = ('code',) if self.mixed_code else ()
            check_same_plan(old['plan'], contents, path, but)
            before = old['plan']['seeds']
            if before == contents['seeds']:
                return old
            contents = old['plan'] | {'seeds': contents['seeds']}
            earlier = [*old['earlier_seeds'], before]
        record = {
            'date': datetime.datetime.now().isoformat(' ', 'seconds'),
            'runs_before': len(list(self.folder.glob('*/log.jsonl'))),
            'earlier_seeds': earlier,
            'plan': contents,
            **code_state(),
        }
        record = {'hash': hash_of(record)} | record
        write_json(path, record)
        return record


@contextlib.contextmanager
def of_arm(name):
    """Let a mistake say in which arm it is."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise type(error)(f'arm {name}: {error}') from error


def take_offset(arm, settings):
    """The seed_offset of an arm, which its settings then lack."""
    offset = settings.pop('seed_offset', 0)
    if not str(offset).isdecimal():
        raise ValueError(
            f'arm {arm}: seed_offset={offset} must be a whole number, which is added to every test seed'
        )
    return int(offset)


def changes(own, base):
    """{fact: value} of what makes an arm, by its facts and the baseline's."""
    found = differences(own, base, ('seed', 'learning_rate', 'resumed'))
    return {name: value for name, (value, _) in found.items()}


def read_plan(path):
    """What a plan.json holds. Raises ValueError if it is damaged, or not as it was written."""
    advice = 'move it away, to write the plan again'
    with unreadable(f'{path} is damaged', advice):
        record = json.loads(path.read_text())
        decisive(record['plan'])
        stated = record['hash']
    if stated != hash_of(record):
        raise ValueError(
            f'{path} was edited: its hash is not {stated} any more; restore it, or {advice}'
        )
    return record


def hash_of(record):
    """The hash of all that a plan.json holds, but for its hash."""
    rest = {name: value for name, value in record.items() if name != 'hash'}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()[:12]


def check_same_plan(old, new, path, but=()):
    """Raise ValueError where two plans differ, but for more seeds and what is in `but`."""
    # Settings that only one of them knows were added or taken away since.
    but = {*but} | (old['settings'].keys() ^ new['settings'].keys())
    if set(old['seeds']) <= set(new['seeds']):
        but.add('seeds')
    other = difference(decisive(old), decisive(new), but)
    if other:
        name, before, now = other
        mixed = f', or {MIXED_CODE}' if name == 'code' else ''
        raise ValueError(
            f'{path} is another plan: {name} was {before}, not {now}; give another --name{mixed}'
        )


def decisive(contents):
    """{name: value} of all in a plan that decides its results."""
    arms = contents['arms']
    values = {'arms': list(arms)}
    for name, arm in arms.items():
        values |= {f'{key} of {name}': arm[key] for key in ('differs', 'rate', 'seed_offset')}
    names = ('contrasts', 'rates', 'seeds', 'tuning_seeds')
    return values | contents['settings'] | {name: contents[name] for name in names}


def code_state():
    """The commit, and the diff of the work tree's Python files: the idea is a change of the code."""
    paths = ['--', '*.py', *(f':!{folder}' for folder in ('tests', 'paper', 'results'))]
    diff = git('diff', 'HEAD', *paths)
    for name in git('ls-files', '--others', '--exclude-standard', *paths).splitlines():
        diff += git('diff', '--no-index', '/dev/null', name)
    return {'commit': commit_of('rev-parse', 'HEAD'), 'diff': diff}
