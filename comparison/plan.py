"""
What a comparison will do, known before its first result: arms, rates, seeds, and the runs of them.

    plan = Plan(
        {'vanilla': {}, 'resformer': {'v_residual': True}},     # the first arm is the baseline
        Path('out/compare/mine'),
        {'dataset': 'stdlib', 'max_iters': 100},                # settings of all arms
        files=[],
        options=CompareConfig(seeds=(1, 2, 3)),                 # of compare.py
    )

A run is (arm, rate, seed), trained by train.py in <folder>/<arm>_lr<rate>_seed<seed>. Arms are those of
arms.py; record.py writes all of it down.
"""

import contextlib
import itertools
from dataclasses import asdict, dataclass, replace

from comparison.arms import ArmPlan, check_given, check_names, of_arm, parse_contrasts
from comparison.runs import ROUNDING, difference, differences, facts
from comparison.verdict import RULES
from lib.data import Dataset
from lib.rundir import code_fingerprint
from train import STARTS, TrainConfig, check_rates, share_of_micro_steps

# How often and on how much a run is evaluated, unless somebody says otherwise: once, on everything.
EVALUATION = ('eval_iters', 'eval_interval')
# Facts that say of which text a validation loss is.
TEXT = ('dataset', 'block_size', 'eval_iters * batch_size')
# Facts in which two runs must agree for their losses to be compared at all.
COMPARABLE = (*TEXT, 'data', 'domains', 'code')


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
    Values may be as text, too. options: a CompareConfig, which says what each of its fields means.
    Raises ValueError or OSError for everything that can be refused before training.
    """

    def __init__(self, arms, folder, common, files, options):
        self.folder = folder
        self.judgement = options.judgement
        self.mixed_code, self.code = options.mixed_code, code_fingerprint()
        self.seeds = seeds_of(options.seeds)
        self.rates = options.rates
        self.tuning_seeds = options.tuning_seeds if self.rates else ()
        check_numbers(self)
        self.rates = tuple(sorted(self.rates))
        check_names(arms)
        self.baseline = next(iter(arms))
        self.contrasts = parse_contrasts(options.contrasts, arms)

        # The config files are read here alone: somebody may edit them while the runs are trained.
        check_given(common, 'the command line', bool(self.rates))
        self.settings = ArmPlan.of({}, common, files).training
        if self.settings.init_from not in STARTS:
            raise ValueError(
                f'init_from={self.settings.init_from!r} in a config file: compare.py trains every run '
                'from scratch; drop it'
            )
        self.arms = {}
        for name, own in arms.items():
            check_given(own, f'arm {name}', bool(self.rates))
            with of_arm(name):
                self.arms[name] = ArmPlan.of(own, common, files)
        self.data = self.data_now()
        check_arms(self)
        seeds = {name: self.test_seeds(name) for name in self.arms}
        check_judgement(self.judgement, self.contrasts, seeds)
        check_pairs(self)

    # --- what train.py is told ---

    def test_seeds(self, arm):
        return [seed + self.arms[arm].seed_offset for seed in self.seeds]

    def own_rate(self, arm):
        """The learning rate of an arm that is not tuned."""
        return self.arms[arm].training.learning_rate

    def example(self, arm):
        """One of an arm's runs, to ask for what all of them have in common."""
        return Run(arm, self.own_rate(arm), 0)

    def arm_facts(self, arm):
        """facts() of an arm's example()."""
        return self.facts(self.example(arm))

    def is_unchanged(self):
        """Whether data and code on the disk are still what they were; with mixed_code, code may differ."""
        is_of_this_code = self.mixed_code or code_fingerprint() == self.code
        return is_of_this_code and self.data in (None, self.data_now())

    def run_folder(self, run):
        return self.folder / run.name

    def chosen_settings(self, run):
        """{setting of TrainConfig: value} that compare.py chooses for a run."""
        arm = self.arms[run.arm]
        # min_lr keeps the config's proportion, or the arm's, if it has a min_lr of its own.
        settings = arm.training if 'min_lr' in arm.own else self.settings
        rate = settings.learning_rate
        least = run.rate * settings.min_lr / rate if rate else 0.0
        return {
            'seed': run.seed,
            'learning_rate': float(f'{run.rate:.12g}'),
            'min_lr': float(f'{least:.12g}'),
            **{name: 0 for name in EVALUATION if name not in arm.named},
            'init_from': 'auto',
            'out_dir': str(self.run_folder(run)),
        }

    @property
    def replaced(self):
        """The eval_iters of the config that chosen_settings() replaces by 0; None where it does not."""
        is_named = 'eval_iters' in self.arms[self.baseline].named
        return None if is_named else self.settings.eval_iters

    def configs(self, run):
        """(TrainConfig, GPTConfig) of a run."""
        arm = self.arms[run.arm]
        return replace(arm.training, **self.chosen_settings(run)), arm.config

    def arguments(self, run):
        """The arguments of train.py for a run: every setting that is not its default."""
        words = []
        for settings in self.configs(run):
            defaults = asdict(type(settings)())
            for name, value in asdict(settings).items():
                if value != defaults[name]:
                    words.append(f'--{name}={value}')
        return words

    # --- what a run must be ---

    def facts(self, run):
        """The facts that a run must have: see comparison/runs.py."""
        training, config = self.configs(run)
        recorded = {'data': self.data, 'code': self.code}
        return facts(asdict(training) | asdict(config) | recorded)

    def ignored(self, arm):
        """Names of facts in which an arm's runs may differ from facts().

        How a run rounds is the machine's choice, unless somebody asked for it.
        """
        ignored = {*ROUNDING} - self.rounding(arm).keys()
        return ignored | {'code'} if self.mixed_code else ignored

    def rounding(self, arm):
        """{how an arm rounds: value} where that is not left to the machine."""
        values = {name: getattr(self.arms[arm].training, name) for name in ROUNDING}
        return {
            name: value for name, value in values.items() if value != getattr(TrainConfig, name)
        }

    def data_now(self):
        """The fingerprint of the data of all arms; None where they are not: runs may be trained
        elsewhere."""
        with contextlib.suppress(ValueError, OSError):
            return Dataset(self.arms[self.baseline].training.dataset).fingerprint()


def seeds_of(seeds):
    """Seeds, from a tuple of them or from how many."""
    if not isinstance(seeds, int):
        return seeds
    if seeds > 1000:
        raise ValueError(f'seeds={seeds} is how many seeds; for this one, write --seeds=({seeds},)')
    return tuple(range(1, seeds + 1))


def changes(own, base):
    """{fact: value} of what makes an arm, by its facts and the baseline's."""
    found = differences(own, base, ('seed', 'learning_rate', 'resumed'))
    return {name: value for name, (value, _) in found.items()}


# --- what is refused ------------------------------------------------------------------------------


def check_numbers(plan):
    """Refuse seeds and rates that are none, or twice the same."""
    for name, least, kind in (('seeds', 0, int), ('tuning_seeds', 0, int), ('rates', 1e-12, float)):
        values = getattr(plan, name)
        kinds = {type(value) for value in values} - {int, kind}
        spell = '{:g}'.format if kind is float else str  # as in the names of runs
        if kinds or len({spell(x) for x in values if x >= least}) < len(values):
            raise ValueError(f'{name}={values} must be different numbers, at least {least}')
    if not plan.seeds:
        raise ValueError('seeds must be at least 1')
    if plan.rates and not (len(plan.rates) > 1 and plan.tuning_seeds):
        raise ValueError(
            f'rates={plan.rates} must be two or more, tried on --tuning_seeds; a single one is '
            '--learning_rate'
        )


def check_arms(plan):
    """Refuse arms whose losses are those of different texts, and a test seed that also chooses a
    learning rate."""
    baseline = plan.arm_facts(plan.baseline)
    for name in plan.arms:
        other = difference(plan.arm_facts(name), baseline, only=TEXT)
        if other:
            key, value, expected = other
            raise ValueError(
                f'arm {name}: {key}={value!r}, but {plan.baseline} has {expected!r}: '
                'their losses would be those of different texts'
            )
        both = sorted(set(plan.test_seeds(name)) & set(plan.tuning_seeds))
        if both:
            raise ValueError(
                f'arm {name}: seeds {both} would both choose the rates and judge the arms; choose '
                'other --tuning_seeds, or another seed_offset'
            )


def check_judgement(judgement, contrasts, seeds):
    """Refuse a judgement that is none, and contrasts and arms that Dunnett's test does not judge.

    contrasts: [(ours, theirs)]. seeds: {arm: its test seeds}, the baseline first.
    """
    if judgement not in RULES:
        raise ValueError(f'judgement={judgement!r} is not one of {", ".join(RULES)}')
    if judgement == 'paired':
        return
    baseline = next(iter(seeds))
    for ours, theirs in contrasts:
        if theirs != baseline:
            raise ValueError(
                f'judgement={judgement} is of arms against {baseline}; drop {ours}-{theirs} of --contrasts'
            )
    for one, other in itertools.combinations(seeds, 2):
        if set(seeds[one]) & set(seeds[other]):
            raise ValueError(
                f'judgement={judgement} takes arms for independent, but {one} and {other} share seeds, and '
                'so weights and batches; give each other seeds, such as "mine: seed_offset=1000"'
            )


def check_pairs(plan):
    """Refuse two arms that are the same run, and a seed of two pairs, whose differences are no longer
    independent."""
    for one, other in itertools.combinations(plan.arms, 2):
        offset, other_offset = (plan.arms[name].seed_offset for name in (one, other))
        if offset != other_offset:
            if set(plan.test_seeds(one)) & set(plan.test_seeds(other)):
                raise ValueError(
                    f'arms {one} and {other}: with seed_offset={offset} and {other_offset}, a '
                    'seed would belong to two pairs; put the offsets further apart than the seeds'
                )
        elif plan.arm_facts(one) == plan.arm_facts(other):
            raise ValueError(
                f'arms {one} and {other} are the same run; to compare a model with itself, give one of them '
                f'other seeds: "{other}: seed_offset=1000"'
            )


def check_training(plan, gpus):
    """Refuse what every training would refuse."""
    for name in plan.arms:
        with of_arm(name):
            settings, config = plan.configs(plan.example(name))
            Dataset(settings.dataset)
            share_of_micro_steps(settings, gpus)
            check_rates(settings, config)
