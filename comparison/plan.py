"""
What a comparison will do, written down before its first result: arms, rates, seeds, and the test.

An arm is a name, and settings on top of the config that all arms share: key=value pairs, config
files, or both. Only the wiring of a config file counts (every field of GPTConfig but its shape), so
that `resformer: config/resformer_82m.py` is a ResFormer of the given size, schedule and data; the
report says which fields were taken.

A run is (arm, rate, seed), trained by train.py in out/compare/<name>/<arm>_lr<rate>_seed<seed>.
plan.json holds everything that decides a result, a hash of it, the commit and the work tree's diff.
"""

import contextlib
import datetime
import functools
import hashlib
import itertools
import json
import math
import platform
import re
import subprocess
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from comparison.runs import ROUNDING, as_json, difference, facts, origin_of
from comparison.verdict import LEVEL, RULE, distributions
from configurator import check_key, configure, read_settings, sort_arguments
from data import Dataset
from files import write_json
from model import GPTConfig
from rundir import FACTS, known_commit
from train import INCIDENTAL, TrainConfig, check_schedule, share_of_micro_steps

ROOT = Path(__file__).parent.parent

# Settings that compare.py itself chooses.
CHOSEN = set('seed out_dir init_from eval_only'.split())
# Where comparisons are, each in a folder of its own.
COMPARISONS = Path('out', 'compare')

METRIC = 'validation loss at the end of training, mean over domains (nats per token)'


@dataclass
class CompareConfig:
    arms: str = ''  # 'vanilla; mine: v_residual=True neutreno=0.2; ...': the first is the baseline
    seeds: int | tuple = 5  # test seeds: 1 to 5, or a tuple of them
    rates: tuple = ()  # learning rates that every arm tries on the tuning seeds; (): untuned
    tuning_seeds: tuple = (101, 102)  # none of them may be a test seed
    contrasts: str = ''  # more, besides each arm against the baseline: 'mine-resformer, a-b'
    equal: str = 'steps'  # or time, flops: each arm has the steps that fit the baseline's budget
    baseline_steps: tuple = ()  # also train the baseline this long, to say what extra cost is worth
    name: str = ''  # its folder in out/compare; '': named for the config or the runs
    jobs: int = 0  # trainings at a time; 0: one per core, or per GPU
    gpus: int = 1  # GPUs of each training, by torchrun
    print: bool = False  # write the commands still to be run, one per line, and train nothing
    watch: bool = False  # train nothing, and redraw the report while runs are under way elsewhere
    timing: bool = True  # measure step times, in turns, on this machine
    runs: tuple = ()  # folders of runs that exist, to be compared as they are

    def __post_init__(self):
        if self.equal not in ('steps', 'time', 'flops'):
            raise ValueError(f"equal={self.equal!r} is not one of 'steps', 'time', 'flops'")
        if self.baseline_steps and self.equal != 'steps':
            raise ValueError(
                f'baseline_steps says what extra cost is worth, and with equal={self.equal} no arm '
                'costs extra; drop one of them'
            )
        if self.jobs < 0 or self.gpus < 1:
            raise ValueError('jobs must be at least 0, and gpus at least 1')
        if isinstance(self.seeds, int):
            self.seeds = tuple(range(1, self.seeds + 1))
        check_numbers('seeds', self.seeds, int, 0)
        check_numbers('tuning_seeds', self.tuning_seeds, int, 0)
        check_numbers('baseline_steps', self.baseline_steps, int, 1)
        check_numbers('rates', self.rates, (int, float), 1e-12)
        if len({f'{rate:g}' for rate in self.rates}) < len(self.rates):
            raise ValueError(f'rates={self.rates} must differ in their first six digits')
        if not self.seeds:
            raise ValueError('seeds must be at least 1')
        if len(self.rates) == 1:
            raise ValueError(
                f'rates={self.rates} holds a single rate, so there is nothing to tune; give it as '
                '--learning_rate'
            )
        if self.rates and not self.tuning_seeds:
            raise ValueError('rates are tried on tuning seeds: give --tuning_seeds')
        both = sorted(set(self.seeds) & set(self.tuning_seeds))
        if self.rates and both:
            raise ValueError(
                f'seeds {both} would both choose the rates and judge the arms; '
                'choose other --tuning_seeds'
            )


def key_of(flag):
    """The name of --name=value."""
    return flag[2:].partition('=')[0]


def check_numbers(name, values, kind, least):
    for value in values:
        if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:
            raise ValueError(f'{name}={values} must be numbers, each at least {least}')
    if len(set(values)) < len(values):
        raise ValueError(f'{name}={values} names one twice')


# --- arms -----------------------------------------------------------------------------------------


@dataclass
class Arm:
    name: str
    words: list  # as given: config files and key=value
    flags: list  # the same settings, as --key=value
    seed_offset: int = 0  # 'again: seed_offset=1000' is the same arm under other seeds
    from_files: dict = field(default_factory=dict)  # {config file: the wiring taken from it}

    def keys(self):
        return {key_of(flag) for flag in self.flags}


def parse_arms(text):
    """{name: Arm} of --arms. Raises ValueError if it cannot be read."""
    arms = {}
    for part in text.split(';'):
        if not part.strip():
            continue
        name, _, words = part.partition(':')
        name = name.strip()
        if not re.fullmatch(r'[^\W_][\w.+-]*', name):  # matplotlib hides a label like _this
            raise ValueError(
                f'arms: {name!r} is not a name; write "vanilla; mine: v_residual=True neutreno=0.2"'
            )
        if name in arms:
            raise ValueError(f'arms: two arms are named {name}')
        arms[name] = make_arm(name, split_words(words))
    if len(arms) < 2:
        raise ValueError('give at least two arms: --arms="vanilla; mine: v_residual=True"')
    return arms


def split_words(text):
    """The words of an arm. A value may hold spaces: residual_lambda=(5.0, 1.0)."""
    words = re.split(r'\s+(?=(?:--)?[a-z]\w*=|\S+\.py(?:\s|$))', text.strip())
    return [word.removeprefix('--') for word in words if word]


def make_arm(name, words):
    arm = Arm(name, words, [])
    for word in words:
        key, equals, value = word.partition('=')
        if word.endswith('.py') and not equals:
            wiring = read_wiring(word)
            arm.flags += [f'--{key}={value}' for key, value in wiring.items()]
            arm.from_files[word] = wiring
        elif not equals:
            raise ValueError(f'arm {name}: {word!r} is neither key=value nor a config file')
        elif key in CHOSEN:
            raise ValueError(f'arm {name}: {key} is not for an arm; compare.py chooses it')
        elif key == 'seed_offset':
            if not value.isdecimal():
                raise ValueError(
                    f'arm {name}: seed_offset={value} must be a whole number, which is added to '
                    'every test seed'
                )
            arm.seed_offset = int(value)
        else:
            arm.flags.append(f'--{word}')
    return arm


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
    """[(arm, arm)]: each arm against the first, then those of --contrasts, such as 'mine-resformer'."""
    baseline = next(iter(arms))
    contrasts = [(name, baseline) for name in arms if name != baseline]
    for word in re.split(r'[\s,;]+', text.strip()):
        if not word:
            continue
        pairs = [pair for pair in itertools.permutations(arms, 2) if contrast_name(*pair) == word]
        if not pairs:
            raise ValueError(f'contrasts: {word!r} is not ARM-ARM of {", ".join(arms)}')
        if len(pairs) > 1:
            meanings = ', or '.join(f'{ours} against {theirs}' for ours, theirs in pairs)
            raise ValueError(f'contrasts: {word!r} may be {meanings}; rename an arm')
        ours, theirs = pairs[0]
        if (ours, theirs) not in contrasts and (theirs, ours) not in contrasts:
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
    steps: int = 0  # of --baseline_steps; 0: the arm's own number

    @property
    def name(self):
        steps = f'_steps{self.steps}' if self.steps else ''
        return f'{self.arm}_lr{self.rate:g}{steps}_seed{self.seed}'


class Plan:
    """A comparison's arms and runs. options: the CompareConfig that the command line argv gives.

    Raises ValueError or OSError for everything that can be refused before the first training.
    """

    def __init__(self, options, argv):
        self.options = options
        self.files, _, flags = sort_arguments(argv, 'runs')
        own = {item.name for item in fields(CompareConfig)}
        self.flags = [flag for flag in flags if key_of(flag) not in own]
        self.keys = {key_of(flag) for flag in self.flags}
        if self.keys & CHOSEN:
            name = min(self.keys & CHOSEN)
            raise ValueError(f'{name} is chosen by compare.py; give --seeds and --name')

        self.arms = parse_arms(options.arms)
        self.baseline = next(iter(self.arms))
        self.contrasts = parse_contrasts(options.contrasts, self.arms)
        self.folder = COMPARISONS / (options.name or self.default_name())
        # The config files are read here alone: somebody may edit them while the runs are trained.
        self.settings, _ = self.configure()
        self.own = {name: self.configure_arm(name) for name in self.arms}
        self.steps = dict.fromkeys(self.arms)  # from share_budget(); None: as the settings say
        self.cache = {}
        self.check_arms()
        self.check_seeds()

    def default_name(self):
        if not self.files:
            raise ValueError('give a config file for all arms, such as config/demo.py, or --name')
        return '_'.join(Path(path).stem for path in self.files)

    def configure(self, arm=None):
        """(TrainConfig, GPTConfig) of all arms' settings, and of one arm's own."""
        flags = self.arms[arm].flags if arm else []
        return configure(TrainConfig, GPTConfig, argv=[*self.files, *self.flags, *flags])

    def configure_arm(self, name):
        """(TrainConfig, GPTConfig) of an arm's own settings."""
        try:
            return self.configure(name)
        except (ValueError, OSError) as error:
            raise type(error)(f'arm {name}: {error}') from error

    # --- what is refused ---

    def check_arms(self):
        """Refuse arms that cannot be trained, and arms that cannot be compared."""
        settings = {}
        for name in self.arms:
            try:
                self.check_arm(name)
                settings[name] = self.arm_settings(Run(name, self.own_rate(name), 0))
            except (ValueError, OSError) as error:
                raise type(error)(f'arm {name}: {error}') from error

        base = settings[self.baseline]
        for name in self.arms:
            difference = text_difference(settings[name], base)
            if difference:
                key, value, expected = difference
                raise ValueError(
                    f'arm {name}: {key}={value!r}, but {self.baseline} has {expected!r}: '
                    'their losses would be those of different texts'
                )
        for one, other in itertools.combinations(self.arms, 2):
            same_seeds = self.arms[one].seed_offset == self.arms[other].seed_offset
            if same_seeds and settings[one] == settings[other]:
                raise ValueError(f'arms {one} and {other} have the same settings')
        if base['max_iters'] in self.options.baseline_steps:
            raise ValueError(
                "baseline_steps must differ from max_iters, the length of the baseline's own runs"
            )

    def check_arm(self, name):
        options = self.options
        keys = self.arms[name].keys()
        # On the command line it would train nothing, and yet change min_lr, which keeps its share.
        if options.rates and 'learning_rate' in keys | self.keys:
            raise ValueError('learning_rate is tuned with --rates; drop one')
        if options.equal != 'steps' and 'max_iters' in keys:
            raise ValueError(f'max_iters follows from --equal={options.equal}; drop it')

    def check_seeds(self):
        """Refuse a test seed that also chooses a learning rate, or that belongs to two pairs.

        The t test takes the differences of a contrast for independent of each other.
        """
        seeds_of = {}
        for name, arm in self.arms.items():
            seeds = {seed + arm.seed_offset for seed in self.options.seeds}
            seeds_of[name] = seeds
            if self.options.rates and seeds & set(self.options.tuning_seeds):
                raise ValueError(f'arm {name}: with its seed_offset, a test seed is a tuning seed')
            if arm.seed_offset and seeds & set(self.options.seeds):
                raise ValueError(f'arm {name}: seed_offset must exceed the test seeds')
        for one, other in itertools.combinations(self.arms, 2):
            offsets = self.arms[one].seed_offset, self.arms[other].seed_offset
            if offsets[0] != offsets[1] and seeds_of[one] & seeds_of[other]:
                raise ValueError(
                    f'arms {one} and {other}: with seed_offset={offsets[0]} and {offsets[1]}, a seed '
                    'would belong to two pairs; put the offsets further apart than the test seeds'
                )

    def check_training(self):
        """Refuse what every training would refuse. Returns warnings."""
        warnings = []
        for name in self.arms:
            try:
                settings, _ = self.configs(Run(name, 1.0, 0))
                Dataset(settings.dataset)
                share_of_micro_steps(settings, self.options.gpus)
                warning = check_schedule(settings)
            except (ValueError, OSError) as error:
                raise type(error)(f'arm {name}: {error}') from error
            if warning:
                warnings.append(f'arm {name}: {warning}')
        return warnings

    # --- what train.py is told ---

    def own_rate(self, arm):
        """The learning rate of an arm that is not tuned."""
        settings, _ = self.own[arm]
        return settings.learning_rate

    def min_rate(self, arm, rate):
        """min_lr for a learning rate: in the config's proportion, or the arm's, if it has a min_lr."""
        settings = self.settings
        if 'min_lr' in self.arms[arm].keys():
            settings, _ = self.own[arm]
        if not settings.learning_rate:
            return 0.0
        return rate * settings.min_lr / settings.learning_rate

    def chosen_settings(self, run):
        """{setting of TrainConfig: value} that compare.py chooses for a run."""
        chosen = {
            'seed': run.seed,
            'learning_rate': float(f'{run.rate:.12g}'),
            'min_lr': float(f'{self.min_rate(run.arm, run.rate):.12g}'),
        }
        # All of the validation split, once, unless the command line or the arm says otherwise.
        for name in ('eval_iters', 'eval_interval'):
            if name not in self.keys | self.arms[run.arm].keys():
                chosen[name] = 0
        steps = run.steps or self.steps[run.arm]
        if steps:
            chosen['max_iters'] = steps
            own, _ = self.own[run.arm]
            if own.lr_decay_iters:
                share = steps / own.max_iters
                chosen['lr_decay_iters'] = max(1, round(share * own.lr_decay_iters))
        return chosen | {'init_from': 'auto', 'out_dir': str(self.run_folder(run))}

    def arguments(self, run):
        """The arguments of train.py for a run."""
        chosen = []
        for name, value in self.chosen_settings(run).items():
            text = f'{value:.12g}' if isinstance(value, float) else value
            chosen.append(f'--{name}={text}')
        return self.files + self.flags + self.arms[run.arm].flags + chosen

    def configs(self, run):
        """(TrainConfig, GPTConfig) of a run."""
        if run not in self.cache:
            training, config = self.own[run.arm]
            self.cache[run] = replace(training, **self.chosen_settings(run)), config
        return self.cache[run]

    def settings_of(self, run):
        """{setting: value} of all that decides a run's numbers, as JSON has them."""
        return decisive_settings(*self.configs(run))

    def wanted(self, run):
        """The facts that a run must have: see comparison/runs.py."""
        training, config = self.configs(run)
        return facts(asdict(training) | asdict(config) | {'data': self.data or None})

    def ignored(self, run):
        """Names of facts in which a run may differ from wanted().

        How a run rounds is the machine's choice, unless it is what its arm is about.
        """
        training, _ = self.configs(run)
        chosen = {name for name in self.arms[run.arm].keys() if name in ROUNDING}
        return {
            name for name in ROUNDING if name not in chosen or getattr(training, name) == 'auto'
        }

    @functools.cached_property
    def data(self):
        """The fingerprint of the data of all arms; '' where they are not: runs may be trained elsewhere."""
        with contextlib.suppress(ValueError, OSError):
            return Dataset(self.settings.dataset).fingerprint()
        return ''

    def arm_settings(self, run):
        """settings_of() a run, and how it rounds: by these, its arm may differ from the others."""
        training, _ = self.configs(run)
        return self.settings_of(run) | {name: getattr(training, name) for name in ROUNDING}

    def max_iters(self, run):
        return self.configs(run)[0].max_iters

    def run_folder(self, run):
        return self.folder / run.name

    def share_budget(self, cost):
        """Give each arm the steps that fit the baseline's budget; cost: {arm: a step's}."""
        for name in self.arms:
            steps = self.settings.max_iters * cost[self.baseline] / cost[name]
            self.steps[name] = max(1, math.floor(steps + 1e-9))
        self.cache.clear()

    def keep_steps(self):
        """Leave arms that have begun the steps that plan.json gave them, whatever their steps cost now.

        With other numbers of steps, their runs would no longer be those of the plan.
        """
        old = read_plan(self.folder / 'plan.json')
        if not old:
            return
        before, now = old['plan'], self.contents()
        for change in plan_changes(before, now):
            if change in ('equal', 'baseline') or change.startswith('settings.'):
                return
        for name, arm in before['arms'].items():
            if (
                self.has_begun(name)
                and name in self.arms
                and arm['words'] == now['arms'][name]['words']
            ):
                self.steps[name] = arm['steps']
        self.cache.clear()

    def has_begun(self, arm):
        """Whether a run of an arm has a log; mine_lr2_lr0.02_seed1 is one of mine_lr2, not of mine."""
        pattern = rf'{re.escape(arm)}_lr[^_]+(_steps\d+)?_seed\d+'
        names = [log.parent.name for log in self.folder.glob('*/log.jsonl')]
        return any(re.fullmatch(pattern, name) for name in names)

    # --- plan.json ---

    def contents(self):
        """What decides the results, as JSON: the part of plan.json that its hash covers."""
        options = self.options
        arms = {}
        shares = {}
        base = self.arm_settings(Run(self.baseline, 1.0, 0))
        for name, arm in self.arms.items():
            settings = self.arm_settings(Run(name, 1.0, 0))
            arms[name] = {
                'words': ' '.join(arm.words),
                'differs': {k: v for k, v in settings.items() if v != base[k]},
                'rate': None if options.rates else self.own_rate(name),
                'seed_offset': arm.seed_offset,
                'steps': settings['max_iters'],
            }
            shares[name] = float(f'{self.min_rate(name, 1.0):.12g}')
        varying = {'seed', 'learning_rate', 'min_lr', *ROUNDING}  # from run to run or arm to arm
        return as_json(
            {
                'metric': METRIC,
                'baseline': self.baseline,
                'arms': arms,
                'min_lr_share': shares,  # of the learning rate
                'contrasts': [contrast_name(*pair) for pair in self.contrasts],
                'seeds': options.seeds,
                'rates': options.rates,
                'tuning_seeds': options.tuning_seeds if options.rates else (),
                'equal': options.equal,
                'baseline_steps': options.baseline_steps,
                'level': LEVEL,
                'rule': RULE,
                'settings': {k: v for k, v in base.items() if k not in varying},
            }
        )

    def write(self, results, trains=True):
        """Write plan.json where it is new or has changed; returns what it holds.

        results: {'tuning': number of finished runs, 'test': ...}. If there are any, a change of the
        plan, or of the code that is to train more runs, is recorded, and the report shows it.
        """
        path = self.folder / 'plan.json'
        old = read_plan(path)
        contents = self.contents()
        code = code_state()
        changes = plan_changes(old['plan'], contents) if old else {}
        unchanged = old is not None and not changes
        if unchanged:
            contents = old['plan']
            if same_code(old, code) or not trains:
                return old

        now = datetime.datetime.now().isoformat(' ', 'seconds')
        plan = {
            'hash': hash_of(contents),
            'date': old['date'] if unchanged else now,
            'results_before': old['results_before'] if old else results,
            'history': history_after(old, changes, results, now),
            'code_changes': code_changes_after(old, code, results, now),
            'plan': contents,
            **code,
            'versions': versions(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(path, plan)
        return plan

    def written(self):
        """What plan.json holds, None where there is none. ValueError if it is another plan."""
        path = self.folder / 'plan.json'
        old = read_plan(path)
        changes = plan_changes(old['plan'], self.contents()) if old else {}
        if changes:
            raise ValueError(
                f'{path} is another plan: {", ".join(changes)} differ; give --watch the arguments '
                'with which it trains'
            )
        return old


def history_after(old, changes, results, now):
    """The earlier plans that some result has been seen with, once this one has been written."""
    history = old['history'] if old else []
    if not changes or not any(results.values()):
        return history
    entry = {'hash': old['hash'], 'date': old['date'], 'until': now, 'results': results}
    return [*history, {**entry, 'changes': changes}]


def code_changes_after(old, code, results, now):
    """The earlier code that some result was made with, once this code has been written."""
    earlier = old['code_changes'] if old else []
    if not old or same_code(old, code) or not any(results.values()):
        return earlier
    return [*earlier, {'date': now, 'results': results, **code_change(old, code)}]


def text_difference(settings, others):
    """The first (setting, value, other value) by which two runs' validation losses are of different
    texts, or None."""
    return settings_difference(evaluated_text(settings), evaluated_text(others))


def evaluated_text(settings):
    """{setting: value} of all that decides on which text a validation loss is measured."""
    text = {name: settings[name] for name in ('dataset', 'block_size')}
    # So many rows, evenly spaced; 0: all of them.
    text['eval_iters * batch_size'] = settings['eval_iters'] * settings['batch_size']
    return text


def decisive_settings(settings, config):
    """{setting: value} of a run's settings that decide its numbers, as JSON has them."""
    values = {**asdict(settings), **asdict(config)}
    return as_json({name: value for name, value in values.items() if name not in INCIDENTAL})


def recorded_settings(config):
    """decisive_settings() of the run that a config.json is of, and its origin: scratch, or whose
    weights it began with.

    A setting that the file lacks was added since, with a default that changes nothing.
    """
    defaults = decisive_settings(TrainConfig(), GPTConfig())
    values = {name: config.get(name, default) for name, default in defaults.items()}
    values['domain_weights'] = values['domain_weights'] or {}  # None in older runs
    known = values.keys() | INCIDENTAL | FACTS
    unknown = {name: value for name, value in config.items() if value and name not in known}
    return {**values, **unknown, 'origin': origin_of(config)}


def settings_difference(ours, theirs):
    """difference() of comparison/runs.py, under its older name."""
    return difference(ours, theirs)


def hash_of(contents):
    return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()[:12]


def read_plan(path):
    if not path.exists():
        return None
    try:
        plan = json.loads(path.read_text())
        for name in ('hash', 'date', 'plan', 'history', 'code_changes', 'results_before'):
            plan[name]
        for name in ('commit', 'diff'):
            plan[name]
    except (ValueError, LookupError, TypeError):
        raise ValueError(f'{path} is damaged; move it away, to write the plan again') from None
    return plan


def plan_changes(old, new):
    """What differs in two plans. What the old one does not speak of was added since."""
    known = {name: value for name, value in new.items() if name in old}
    changes = changes_between(old, known)
    for name in new['settings'].keys() - old['settings'].keys():
        changes.pop(f'settings.{name}', None)
    return changes


def changes_between(old, new, prefix=''):
    """{name: [old value, new value]} of two plans, nested names joined by dots."""
    changes = {}
    for name in {**old, **new}:
        a, b = old.get(name), new.get(name)
        if isinstance(a, dict) and isinstance(b, dict):
            changes |= changes_between(a, b, f'{prefix}{name}.')
        elif a != b:
            changes[f'{prefix}{name}'] = [a, b]
    return changes


# --- what it is run with --------------------------------------------------------------------------


def code_state():
    """The commit, and the diff of the work tree's Python files: the idea is a change of the code."""
    paths = ['--', '*.py', *(f':!{folder}' for folder in ('tests', 'paper', 'results'))]

    def git(*words):
        done = subprocess.run(['git', *words], cwd=ROOT, capture_output=True, text=True)
        return done.stdout

    commit, diff = '', ''
    with contextlib.suppress(OSError):  # no git here
        commit = git('rev-parse', 'HEAD').strip()
        diff = git('diff', 'HEAD', *paths)
        for name in git('ls-files', '--others', '--exclude-standard', *paths).splitlines():
            diff += git('diff', '--no-index', '/dev/null', name)
    return {'commit': known_commit(commit), 'diff': diff}


def same_code(plan, code):
    """Whether a plan was written with this code; code: of code_state()."""
    return all(plan[name] == value for name, value in code.items())


def code_change(old, new):
    """How the code changed, and the diff that it had before."""
    what = f'commit {old["commit"][:12]} became {new["commit"][:12]}'
    if old['commit'] == new['commit']:
        what = 'the uncommitted changes are no longer the same'
    return {'what': what, 'commit': old['commit'], 'diff': old['diff']}


def versions():
    import numpy
    import scipy
    import torch

    distributions()
    return {
        'python': platform.python_version(),
        'torch': str(torch.__version__),
        'numpy': numpy.__version__,
        'scipy': scipy.__version__,
    }
