"""
The paper as data: which models each table and figure compares, what is claimed of them, and what is
printed.

A figure is a comparison: its panels name arms, an arm is a model at a size, a sequence length, a
learning rate and a warm-up. A claim is a contrast of two arms, with the sign that the paper prints.
reproduce.py trains, judges and draws them.

Tables, figures and equations are numbered as in the first version, arXiv:2410.17897v1 (October 2024).
Sentences were read in its revision of November 2024, which numbers figures differently: Figs. 3 to 8
there are 4 to 11, Figs. 9 to 14 are 12 to 17. `v5` is the version of June 2025.
"""

import functools
import itertools
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from comparison.plan import read_wiring
from configurator import configure, read_settings
from model import GPTConfig
from train import TrainConfig

CONFIG = Path(__file__).parent.parent / 'config'

# --- scales ---------------------------------------------------------------------------------------

# Table 4's sizes, of which config/vanilla_<size>.py says what they are, and Table 3's lengths.
SIZES = ('2m', '82m', '180m', '468m')
LENGTHS = (512, 2048, 8192, 32000, 64000)
LONGEST = LENGTHS[-1]


@dataclass
class Scale:
    """How the paper's experiments are scaled."""

    name: str
    tokens: int  # a step
    settings: dict  # of every run; what is not here is TrainConfig's default, the paper's
    sizes: dict  # {size of the paper: {setting: value}}
    lengths: tuple  # in place of LENGTHS; the second one is the usual one, as in the paper
    rates: tuple  # learning rates of Fig. 12a, the usual one first
    warmups: tuple  # warm-ups of Fig. 12b, the usual one first
    window: int  # steps whose mean is a training loss; points of curves are means of half as many
    sequences: int  # of an analysis
    minutes: float = 0  # a run on one core, roughly; 0: not for a core


def shapes(*rows):
    """{size of the paper: shape}; rows: layers, heads and width, from small to large."""
    names = ('n_layer', 'n_head', 'n_embd')
    return {size: dict(zip(names, row, strict=True)) for size, row in zip(SIZES, rows, strict=True)}


# The values that the paper does not give for Figs. 12a and 12b are ours.
PAPER = Scale(
    'paper',
    tokens=2**21,
    settings={},
    sizes={size: read_settings(str(CONFIG / f'vanilla_{size}.py')) for size in SIZES},
    lengths=LENGTHS,
    rates=(6e-4, 3e-4, 1e-4),
    warmups=(120, 1200),
    window=50,
    sequences=1000,
)

# 1,250 steps of 4,096 bytes of text, as in results/claims: 6 to 25 minutes on one core.
CLAIMS_SIZE = Scale(
    'claims',
    tokens=4096,
    settings=read_settings(str(CONFIG / 'claims.py')),
    sizes=shapes((4, 4, 32), (8, 4, 64), (10, 4, 80), (12, 4, 96)),
    lengths=(64, 256, 512, 1024, 2048),
    rates=(6e-3, 3e-3, 1e-3),
    warmups=(25, 250),
    window=100,
    sequences=200,
    minutes=15,
)

# 120 steps of 4,096 bytes of code: 20 to 60 seconds on two cores.
TINY = Scale(
    'tiny',
    tokens=4096,
    settings=dict(
        dataset='stdlib',
        vocab_size=320,
        gradient_accumulation_steps=1,
        max_iters=120,
        learning_rate=3e-3,
        min_lr=3e-4,
        eval_iters=4,
        compile=False,
    ),
    sizes=shapes((4, 8, 32), (8, 8, 64), (10, 8, 80), (12, 8, 96)),
    lengths=(64, 256, 512, 1024, 2048),
    rates=(3e-3, 1.5e-3, 5e-4),
    warmups=(10, 60),
    window=20,
    sequences=50,
    minutes=1,
)

SCALES = {scale.name: scale for scale in (PAPER, CLAIMS_SIZE, TINY)}

# --- arms -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    model: str = 'vanilla'  # the wiring of config/<model>_82m.py, and +setting=value of train.py
    size: str = '82m'  # of SIZES
    length: int = 2048  # of LENGTHS
    rate: int = 0  # index into the scale's rates
    warmup: int = 0  # index into the scale's warm-ups

    def unusual(self):
        """{field: value} of its size, length, rate and warm-up where they are not the usual ones."""
        values, usual = asdict(self), asdict(Arm(self.model))
        return {name: value for name, value in values.items() if value != usual[name]}

    @property
    def name(self):
        """One arm has one name, such as svformer_share_v_every_2_length512; its runs have it, too."""
        model = re.sub(r'[^\w.]+', '_', self.model.replace('=True', '')).strip('_')
        return '_'.join([model, *(f'{name}{value}' for name, value in self.unusual().items())])

    def words(self, scale, names, told=()):
        """Its model, by `names`, and what is unusual about it at a scale; told: fields to tell anyway."""
        words = {
            'size': self.size.upper(),
            'length': f'{scale.lengths[LENGTHS.index(self.length)]:,} tokens',
            'rate': f'rate {scale.rates[self.rate]:g}',
            'warmup': f'warm-up {scale.warmups[self.warmup]:,}',
        }
        told = {*told, *self.unusual()}
        return ', '.join([names[self.model], *(words[name] for name in words if name in told)])

    def __str__(self):
        return self.words(PAPER, NAMES)

    def baseline(self):
        """The arm whose loss is the zero of its curves."""
        return replace(self, model=GPT2 if self.model.startswith(GPT2) else V)

    def settings(self, scale):
        """{name: value} of train.py's settings; those after a + of the model are text."""
        values = scale.settings | scale.sizes[self.size] | wiring_of(self.model)
        values = {name: value for name, value in values.items() if name not in ('out_dir', 'seed')}
        if 'n_kv_head' in values:  # of 8 heads
            values['n_kv_head'] = max(1, values['n_kv_head'] * values['n_head'] // 8)
        length = scale.lengths[LENGTHS.index(self.length)]
        rows = scale.tokens // length // values['gradient_accumulation_steps']
        rate = scale.rates[self.rate]
        return values | {
            'block_size': length,
            'batch_size': rows,
            'learning_rate': rate,
            'min_lr': rate / 10,
            'warmup_iters': scale.warmups[self.warmup],
        }

    def configs(self, scale):
        """Its (TrainConfig, GPTConfig)."""
        flags = [f'--{name}={value}' for name, value in self.settings(scale).items()]
        return configure(TrainConfig, GPTConfig, argv=flags)


@functools.cache
def wiring_of(model):
    """{field of GPTConfig: value} of a model's config file, and what is after a + of its name."""
    name, *flags = model.split('+')
    path = CONFIG / ('gpt2_78m.py' if name == 'gpt2' else f'{name}_82m.py')
    return read_wiring(str(path)) | dict(flag.split('=', 1) for flag in flags)


V, R, S = 'vanilla', 'resformer', 'svformer'
NEUTRENO, DENSEFORMER, CLA, GQA = 'neutreno', 'denseformer', 'cla', 'gqa'
BOTH = 'neutreno_resformer'
KEYS_OF_2, VALUES_OF_2 = 'vanilla+share_k=True+share_k_every=2', 'svformer+share_v_every=2'
ON_QUERIES, ON_KEYS = 'vanilla+q_residual=True', 'vanilla+k_residual=True'
IDENTITY, CROSS = 'resformer+residual_map=identity', 'resformer+residual_map=cross'
EQ_6 = 'resformer+residual_map=identity+residual_from=all'
PREVIOUS, ALL = 'resformer+residual_from=previous', 'resformer+residual_from=all'
LEARNED, CONSTANT, SPARSE = 'learned_resformer', 'constant_resformer', 'sparse_resformer'
LAMBDA_02 = 'resformer+residual_lambda=(0.2,1.0)'
LAMBDA_1 = 'resformer+residual_lambda=(1.0,1.0)'
LAMBDA_5 = 'resformer+residual_lambda=(5.0,1.0)'
FIRST_QUERIES, FIRST_KEYS = 'vanilla+share_q=True', 'vanilla+share_k=True'
TWO_ANCHORS, FOUR_ANCHORS = 'svformer+share_v_every=4', VALUES_OF_2
GPT2, GPT2_R, GPT2_S = 'gpt2', 'gpt2+v_residual=True', 'gpt2+share_v=True'
EIGHTH = ('svformer_gqa', 'mqa', 'cla_gqa')

# What a reader calls each model.
NAMES = {
    V: 'vanilla',
    R: 'ResFormer',
    S: 'SVFormer',
    NEUTRENO: 'NeuTRENO',
    BOTH: 'NeuTRENO + ResFormer',
    DENSEFORMER: 'DenseFormer',
    GQA: 'GQA',
    CLA: 'CLA',
    ON_QUERIES: 'residual on queries',
    ON_KEYS: 'residual on keys',
    IDENTITY: 'identity map',
    EQ_6: 'identity map of all sources (Eq. 6)',
    CROSS: 'cross-layer attention',
    PREVIOUS: 'source: previous layer',
    ALL: 'source: all earlier layers',
    LAMBDA_02: 'V_n + 0.2 V_1',
    LAMBDA_1: 'V_n + 1 V_1',
    CONSTANT: 'V_n + 2 V_1',
    LAMBDA_5: 'V_n + 5 V_1',
    LEARNED: 'ResFormer, learned weights',
    SPARSE: 'ResFormer, sparse with 5',
    KEYS_OF_2: 'keys shared by twos',
    VALUES_OF_2: 'values shared by twos',
    TWO_ANCHORS: 'SVFormer, two anchors',
    FIRST_QUERIES: "all share the first layer's queries",
    FIRST_KEYS: "all share the first layer's keys",
    'svformer_gqa': 'SVFormer, two KV heads',
    'mqa': 'MQA',
    'cla_gqa': 'CLA, two KV heads',
    GPT2: 'GPT-2',
    GPT2_R: 'ResFormer on GPT-2',
    GPT2_S: 'SVFormer on GPT-2',
}


# --- figures --------------------------------------------------------------------------------------


@dataclass
class Panel:
    """how: 'curves' and 'critical' show arms minus their baselines, 'scaling' losses by size, 'wiring'
    needs no run, 'tasks' and 'loss' are tables, and the others are analyses of paper.analyze."""

    how: str
    arms: list
    title: str = ''  # what is seen, where the figure has several panels

    def runs(self):
        """Each arm that must be trained, once, baselines first."""
        if self.how == 'wiring':
            return []
        if self.how not in ('curves', 'critical'):
            return self.arms
        baselines = [arm.baseline() for arm in self.arms]
        return list(dict.fromkeys(baselines + self.arms))


@dataclass
class Figure:
    title: str  # what is seen
    panels: list
    names: dict = field(default_factory=dict)  # {model: its name here}, in place of NAMES
    has_outside_panel: bool = False  # about checkpoints from elsewhere, which is left out here

    def runs(self):
        return list(dict.fromkeys(arm for panel in self.panels for arm in panel.runs()))


def arms_of(*models, **more):
    return [Arm(model, **more) for model in models]


def at_each(setting, values, *models):
    """The models at each value of a setting: size, length, rate or warmup."""
    return [arm for value in values for arm in arms_of(*models, **{setting: value})]


def curves(*models):
    return [Panel('curves', arms_of(*models))]


BY_SIZE = at_each('size', SIZES, V, R)
SOME_LENGTHS = (2048, 32000, LONGEST)  # of Fig. 5

FIGURES = {
    'table1': Figure(
        'Zero-shot tasks', [Panel('tasks', arms_of(V, R) + arms_of(V, R, length=LONGEST))]
    ),
    'table5': Figure('Validation loss, mean of the domains', [Panel('loss', BY_SIZE)]),
    'fig1': Figure(
        'Models compared, and attention entropy',
        [
            Panel('curves', arms_of(R, NEUTRENO, BOTH, DENSEFORMER), 'Models compared'),
            Panel(
                'entropy',
                arms_of(V, R, NEUTRENO, DENSEFORMER, S),
                'How evenly attention is spread over tokens',
            ),
        ],
        has_outside_panel=True,
    ),
    'fig2': Figure(
        'Whose queries, keys and values a layer uses',
        [Panel('wiring', arms_of(V, NEUTRENO, DENSEFORMER, R, S))],
    ),
    'fig3': Figure(
        'Cross-layer attention and its approximations',
        [Panel('mapping', arms_of(V))],
        has_outside_panel=True,
    ),
    'fig4': Figure(
        'Sharing keys or values every two layers',
        curves(KEYS_OF_2, VALUES_OF_2, CLA),
        {KEYS_OF_2: 'keys shared', VALUES_OF_2: 'values shared', CLA: 'both shared (CLA)'},
    ),
    'fig5': Figure(
        'ResFormer by sequence length and by size',
        [
            Panel('curves', at_each('length', SOME_LENGTHS, R), 'ResFormer by sequence length'),
            Panel('scaling', BY_SIZE, 'Loss by size'),
            Panel('curves', at_each('size', SIZES, R), 'ResFormer by size'),
        ],
    ),
    'fig6': Figure(
        'Residual on queries, keys or values',
        curves(ON_QUERIES, ON_KEYS, R),
        {ON_QUERIES: 'queries', ON_KEYS: 'keys', R: 'values (ResFormer)'},
    ),
    'fig7': Figure(
        'How the source values are mapped',
        curves(R, IDENTITY, EQ_6, CROSS),
        {
            R: 'current (ResFormer)',
            IDENTITY: 'identity',
            EQ_6: 'identity, all layers',
            CROSS: 'cross',
        },
    ),
    'fig8': Figure(
        'Which layers are the source',
        curves(R, PREVIOUS, ALL),
        {R: 'first (ResFormer)', PREVIOUS: 'previous', ALL: 'all earlier'},
    ),
    'fig9': Figure('Spectra of the values', [Panel('spectrum', arms_of(V, R))]),
    'fig10': Figure(
        'Less KV cache: half, and an eighth',
        [
            Panel(
                'curves',
                arms_of(S, GQA, CLA) + arms_of(S, GQA, CLA, length=LONGEST),
                'Half the KV cache',
            ),
            Panel('curves', arms_of(*EIGHTH, length=LONGEST), 'An eighth of the KV cache'),
        ],
        dict(zip(EIGHTH, ('SVFormer', 'MQA', 'CLA'), strict=True)),
    ),
    'fig11': Figure(
        'SVFormer by sequence length',
        [
            Panel('curves', at_each('length', LENGTHS, S), 'SVFormer by sequence length'),
            Panel('critical', at_each('length', LENGTHS, S), 'Whether vanilla overtakes SVFormer'),
        ],
    ),
    'fig12a': Figure('SVFormer by learning rate', [Panel('curves', at_each('rate', (0, 1, 2), S))]),
    'fig12b': Figure('SVFormer by warm-up', [Panel('curves', at_each('warmup', (0, 1), S))]),
    'fig12c': Figure('SVFormer by size', [Panel('curves', at_each('size', SIZES, S))]),
    'fig12d': Figure(
        "On GPT-2's architecture", curves(S, GPT2_S, GPT2_R), {S: 'SVFormer on Llama'}
    ),
    'fig13': Figure(
        "All layers use the first layer's queries, keys or values",
        curves(FIRST_QUERIES, FIRST_KEYS, S),
        {FIRST_QUERIES: 'queries', FIRST_KEYS: 'keys', S: 'values (SVFormer)'},
    ),
    'fig14': Figure(
        "SVFormer's anchors: layers that have their own values",
        curves(FOUR_ANCHORS, TWO_ANCHORS, S),
        {FOUR_ANCHORS: 'four anchors', TWO_ANCHORS: 'two anchors', S: 'one anchor'},
    ),
    'fig15': Figure(
        'Similarity of tokens', [Panel('similarity', arms_of(V, R, S))], has_outside_panel=True
    ),
}


def number_of(name):
    """Fig. 12a of fig12a, Table 1 of table1."""
    return name.replace('fig', 'Fig. ').replace('table', 'Table ')


# --- claims -------------------------------------------------------------------------------------

# Signs of a claim: how our metric compares with theirs, as printed.
SIGNS = {'<': 'below', '>': 'above', '>=': 'not below'}

# What a claim is about.
METRICS = {
    'final loss': 'training loss at the end',
    'early loss': 'training loss in the first tenth of the steps',
    'lead': "training loss at the end, minus vanilla's in the same setting",
    'overtaken': 'training loss at the end of runs in which vanilla has had time to catch up',
    'critical step': 'step at which it is overtaken by vanilla',
    'validation loss': 'validation loss at the end, mean of the domains',
    'accuracy': 'zero-shot accuracy, mean of the tasks',
    'entropy': 'entropy of token importance, deeper half of the layers',
    'entropy with depth': 'entropy of token importance, deeper half minus layer 1',
    'mapping': "cosine to cross-layer attention's output: Eq. 6 minus Eq. 3, layers 2 and up",
    'eigenvalue, attended': 'largest eigenvalue of the values attended with, log of the ratio, median '
    'of the layers',
    'eigenvalue, projected': 'largest eigenvalue of the values as projected, log of the ratio, median '
    'of the layers',
    'similarity': 'mean cosine of hidden states, mean of the layers',
}


@dataclass(frozen=True)
class Claim:
    """What the paper prints: the metric of `ours` is below, above or not below that of `theirs`.

    In `entropy with depth` and `mapping`, ours equals theirs: such a metric is a difference within one
    run.
    """

    figure: str  # of FIGURES, whose runs can test it; or a later version. Its family for Holm
    where: str  # the place where it is printed
    says: str  # the claim in our words
    ours: Arm
    sign: str  # of SIGNS
    theirs: Arm
    metric: str = 'final loss'  # of METRICS
    caveat: str = ''  # why a verdict would say too much, whatever p is


def statement(figure, where, says, *contrasts, metric='final loss', caveat='', **more):
    """A Claim for each contrast (ours, sign, theirs) of one statement of the paper.

    Ours and theirs are Arms, or models at the size or length in `more`.
    """
    result = []
    for ours, sign, theirs in contrasts:
        pair = [arm if isinstance(arm, Arm) else Arm(arm, **more) for arm in (ours, theirs)]
        result.append(Claim(figure, where, says, pair[0], sign, pair[1], metric, caveat))
    return result


CLAIMS = [
    # ResFormer and the others
    *statement(
        'table1',
        'Table 1',
        'ResFormer answers 0.355 of the questions, vanilla 0.333',
        (R, '>', V),
        metric='accuracy',
    ),
    *statement(
        'table1',
        'Table 1',
        'ResFormer answers 0.350 of the questions, vanilla 0.328, trained at length 64,000',
        (R, '>', V),
        metric='accuracy',
        length=LONGEST,
    ),
    *statement(
        'fig1',
        'abstract, Section 4.2, Fig. 1 left',
        'ResFormer is better than vanilla, NeuTRENO and DenseFormer',
        (R, '<', V),
        (R, '<', NEUTRENO),
        (R, '<', DENSEFORMER),
    ),
    *statement(
        'fig1',
        'Section 4.2, Fig. 1 left',
        'NeuTRENO on top of ResFormer is better still',
        (BOTH, '<', R),
    ),
    *statement(
        'table5',
        'Table 5',
        'ResFormer is below vanilla at every size, and in every domain: 2.7117 and 2.7389 at 82M, 2.4692 '
        'and 2.5015 at 180M, 2.2537 and 2.2806 at 468M',
        *[(Arm(R, size), '<', Arm(V, size)) for size in ('82m', '180m', '468m')],
        metric='validation loss',
    ),
    *statement(
        'fig5',
        'Section 4.2, Fig. 5 left',
        'ResFormer is below vanilla throughout training, so also at the end, at every sequence length',
        *[(Arm(R, length=T), '<', Arm(V, length=T)) for T in SOME_LENGTHS],
    ),
    # attention concentration and what goes with it
    *statement(
        'fig1',
        'Section 4.5, Fig. 1 middle',
        'attention concentrates more and more with depth in vanilla',
        (V, '<', V),
        metric='entropy with depth',
    ),
    *statement(
        'fig1',
        'abstract, Section 4.5, Fig. 1 middle',
        'attention concentrates less in ResFormer than in vanilla',
        (V, '<', R),
        metric='entropy',
    ),
    *statement(
        'fig3',
        'Section 3.2, Fig. 3',
        "the layer's own attention matrix approximates cross-layer attention better than the identity",
        (V, '<', V),
        metric='mapping',
    ),
    *statement(
        'fig9',
        'Section 4.5, Fig. 9',
        'the values of most layers have larger eigenvalues in ResFormer',
        (R, '>', V),
        metric='eigenvalue, attended',
        caveat='this metric was chosen after the first look at the runs',
    ),
    *statement(
        'fig9',
        'Section 4.5, Fig. 9',
        'the values of most layers have larger eigenvalues in ResFormer',
        (R, '>', V),
        metric='eigenvalue, projected',
    ),
    *statement(
        'fig15',
        'Fig. 15 left, which no sentence states',
        'tokens are less alike in ResFormer than in vanilla',
        (R, '<', V),
        metric='similarity',
    ),
    # ablations of ResFormer
    *statement(
        'fig6',
        'Section 4.3, Fig. 6',
        'only a residual on values helps',
        (R, '<', V),
        (R, '<', ON_QUERIES),
        (R, '<', ON_KEYS),
        (ON_QUERIES, '>=', V),
        (ON_KEYS, '>=', V),
    ),
    *statement(
        'fig7',
        'Section 4.3, Fig. 7',
        'the identity map does poorly (source: the first layer; Eq. 6 as printed)',
        (R, '<', IDENTITY),
        (R, '<', EQ_6),
    ),
    *statement(
        'fig7',
        'Section 4.3, Fig. 7',
        'ResFormer ends even below cross-layer attention',
        (R, '<', CROSS),
    ),
    *statement(
        'fig8',
        'Section 4.3, Fig. 8',
        'the first layer is a better source than the previous one or all earlier ones',
        (R, '<', PREVIOUS),
        (R, '<', ALL),
    ),
    *statement(
        'the revision',
        'the revision, Fig. 8 and Section 4.2',
        'V_n + lambda V_1 is better than vanilla at any lambda, and best at 2',
        (LAMBDA_02, '<', V),
        (CONSTANT, '<', LAMBDA_1),
        (CONSTANT, '<', LAMBDA_5),
    ),
    *statement(
        'v5',
        'v5, validation losses at 82M: 2.712, 2.705, 2.700, 2.687',
        'learned weights are better than uniform ones, constant (2, 1) better, sparse with 5 best',
        (LEARNED, '<', R),
        (CONSTANT, '<', LEARNED),
        (SPARSE, '<', CONSTANT),
        metric='validation loss',
    ),
    # SVFormer
    *statement(
        'fig4',
        'Section 3.5, Fig. 4',
        'sharing the values of every two layers costs less than sharing their keys',
        (VALUES_OF_2, '<', KEYS_OF_2),
    ),
    *statement(
        'fig10',
        'abstract, Section 4.6, Fig. 10',
        'at length 64,000 SVFormer is better than GQA and CLA',
        (S, '<', GQA),
        (S, '<', CLA),
        length=LONGEST,
    ),
    *statement(
        'fig10',
        'Section 4.6, Fig. 10',
        'at length 2,048 SVFormer is worse than GQA',
        (S, '>', GQA),
        caveat='runs too short to say whether vanilla overtakes SVFormer are too short for this',
    ),
    *statement(
        'fig11',
        'abstract, Section 4.6, Fig. 11 left',
        'SVFormer learns faster than vanilla at first',
        *[(Arm(S, length=T), '<', Arm(V, length=T)) for T in LENGTHS],
        metric='early loss',
    ),
    *statement(
        'fig11',
        'Section 4.6, Fig. 11',
        'SVFormer is overtaken by vanilla in the end (at length 64,000: predicted, after training)',
        *[(Arm(S, length=T), '>', Arm(V, length=T)) for T in LENGTHS[:-1]],
        metric='overtaken',
    ),
    *statement(
        'fig11',
        'Section 4.6, Fig. 11 right',
        'the longer the sequence, the later is SVFormer overtaken',
        *[
            (Arm(S, length=shorter), '<', Arm(S, length=longer))
            for shorter, longer in itertools.pairwise(LENGTHS)
        ],
        metric='critical step',
    ),
    *statement(
        'fig12a',
        'Section 4.7, Fig. 12a',
        'SVFormer gains more from a smaller learning rate than vanilla does',
        (Arm(S, rate=1), '<', Arm(S)),
        (Arm(S, rate=2), '<', Arm(S, rate=1)),
        metric='lead',
    ),
    *statement(
        'fig13',
        'Section 4.8, Fig. 13',
        "sharing all of the first layer's queries or keys costs much; similar to Fig. 4",
        (FIRST_QUERIES, '>', V),
        (FIRST_KEYS, '>', V),
        (S, '<', FIRST_QUERIES),
        (S, '<', FIRST_KEYS),
    ),
    *statement(
        'fig14',
        'Section 4.8, Fig. 14',
        'the more anchors, the better is SVFormer',
        (TWO_ANCHORS, '<', S),
        (FOUR_ANCHORS, '<', TWO_ANCHORS),
    ),
]
