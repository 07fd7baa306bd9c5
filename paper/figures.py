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
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from comparison.arms import read_wiring
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
    duration: str  # of a run, roughly


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
    duration='hours on eight GPUs',
)

SHORT_LENGTHS = (64, 256, 512, 1024, 2048)

# 1,250 steps of 4,096 bytes of text, as in results/claims: 9 to 34 minutes on one core.
CLAIMS_SIZE = Scale(
    'claims',
    tokens=4096,
    settings=read_settings(str(CONFIG / 'claims.py')),
    sizes=shapes((4, 4, 32), (8, 4, 64), (10, 4, 80), (12, 4, 96)),
    lengths=SHORT_LENGTHS,
    rates=(6e-3, 3e-3, 1e-3),
    warmups=(25, 250),
    window=100,
    sequences=200,
    duration='about 15 min on one core',
)

# 120 steps of 4,096 bytes of code: 20 to 60 seconds on two cores.
TINY = Scale(
    'tiny',
    tokens=4096,
    settings=read_settings(str(CONFIG / 'demo.py')) | {'max_iters': 120, 'eval_iters': 4},
    sizes=shapes((4, 8, 32), (8, 8, 64), (10, 8, 80), (12, 8, 96)),
    lengths=SHORT_LENGTHS,
    rates=(3e-3, 1.5e-3, 5e-4),
    warmups=(10, 60),
    window=20,
    sequences=50,
    duration='about 1 min on one core',
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
        """One arm has one name, such as svformer_share_v_2_length512; its runs have it, too."""
        model = re.sub(r'[^\w.]+', '_', self.model.replace('=True', '')).strip('_')
        return '_'.join([model, *(f'{name}{value}' for name, value in self.unusual().items())])

    def words(self, scale, told=()):
        """Its model, and what is unusual about it at a scale; told: fields to tell anyway."""
        size = '{n_layer} x {n_embd}'.format(**scale.sizes[self.size])
        words = {
            'size': self.size.upper() if scale is PAPER else size,
            'length': f'{scale.lengths[LENGTHS.index(self.length)]:,} tokens',
            'rate': f'rate {scale.rates[self.rate]:g}',
            'warmup': f'warm-up {scale.warmups[self.warmup]:,}',
        }
        told = {*told, *self.unusual()}
        return ', '.join([NAMES[self.model], *(words[name] for name in words if name in told)])

    def __str__(self):
        return self.words(PAPER)

    def baseline(self):
        """The arm whose loss is the zero of its curves."""
        return replace(self, model='gpt2' if self.model.startswith('gpt2') else V)

    def kv_heads(self, scale):
        """As large a share of a scale's heads as the model has of the paper's eight."""
        return int(wiring_of(self.model).get('n_kv_head', 8)) * scale.sizes[self.size]['n_head'] / 8

    def settings(self, scale):
        """{name: value} of train.py's settings; those after a + of the model are text."""
        values = scale.settings | scale.sizes[self.size] | wiring_of(self.model)
        values = {name: value for name, value in values.items() if name not in ('out_dir', 'seed')}
        if 'n_kv_head' in values:
            values['n_kv_head'] = int(self.kv_heads(scale))
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

# What a reader calls each model.
NAMES = {
    'vanilla': 'vanilla',
    'resformer': 'ResFormer',
    'svformer': 'SVFormer',
    'neutreno': 'NeuTRENO',
    'neutreno_resformer': 'NeuTRENO + ResFormer',
    'denseformer': 'DenseFormer',
    'gqa': 'GQA',
    'cla': 'CLA',
    'vanilla+q_residual=True': 'residual on queries',
    'vanilla+k_residual=True': 'residual on keys',
    'resformer+residual_map=identity': 'identity map',
    'resformer+residual_map=identity+v_residual=all': 'identity map of all sources (Eq. 6)',
    'resformer+residual_map=cross': 'cross-layer attention',
    'resformer+v_residual=previous': 'source: previous layer',
    'resformer+v_residual=all': 'source: all earlier layers',
    'resformer+residual_lambda=(0.2,1.0)': 'V_n + 0.2 V_1',
    'resformer+residual_lambda=(1.0,1.0)': 'V_n + 1 V_1',
    'constant_resformer': 'V_n + 2 V_1',
    'resformer+residual_lambda=(5.0,1.0)': 'V_n + 5 V_1',
    'learned_resformer': 'ResFormer, learned weights',
    'sparse_resformer': 'ResFormer, sparse with 5',
    'vanilla+share_k=2': 'keys shared by twos',
    'svformer+share_v=2': 'values shared by twos',
    'svformer+share_v=4': 'SVFormer, two anchors',
    'vanilla+share_q=True': "all share the first layer's queries",
    'vanilla+share_k=True': "all share the first layer's keys",
    'svformer_gqa': 'SVFormer, two KV heads',
    'mqa': 'MQA',
    'cla_gqa': 'CLA, two KV heads',
    'gpt2': 'GPT-2',
    'gpt2+v_residual=True': 'ResFormer on GPT-2',
    'gpt2+share_v=True': 'SVFormer on GPT-2',
}


def arms_at(models, **at):
    """[Arm] of some models, 'vanilla resformer', at each value of a setting: length=LENGTHS."""
    places = [dict(zip(at, values, strict=True)) for values in itertools.product(*at.values())]
    return [Arm(model, **place) for place in places for model in models.split()]


# --- figures --------------------------------------------------------------------------------------


class Panel:
    """How: 'curves' and 'critical' show arms minus their baselines, 'scaling' losses by size, 'wiring'
    needs no run, 'tasks' and 'loss' are tables, and the others are analyses of paper.analyze. Its arms
    are some models, at each value of a setting; title: what is seen, where a figure has several."""

    def __init__(self, how, models, title='', **at):
        self.how = how
        self.arms = arms_at(models, **at)
        self.title = title

    def runs(self):
        """The arms that must be trained, baselines first."""
        if self.how == 'wiring':
            return []
        if self.how not in ('curves', 'critical'):
            return self.arms
        return [arm.baseline() for arm in self.arms] + self.arms


class Figure:
    """title: what is seen. Panels about checkpoints from elsewhere are left out here."""

    def __init__(self, title, *panels):
        self.title = title
        self.panels = panels

    def runs(self, scale=PAPER):
        """Each arm that must be trained, once. A scale with four heads has no eighth of them for MQA."""
        arms = dict.fromkeys(arm for panel in self.panels for arm in panel.runs())
        return [arm for arm in arms if arm.kv_heads(scale) >= 1]


SOME_LENGTHS = (2048, 32000, LONGEST)  # of Fig. 5

FIGURES = {
    'table1': Figure(
        'Zero-shot tasks', Panel('tasks', 'vanilla resformer', length=(2048, LONGEST))
    ),
    'table5': Figure(
        'Validation loss, mean of the domains', Panel('loss', 'vanilla resformer', size=SIZES)
    ),
    'fig1': Figure(
        'Models compared, and attention entropy',
        Panel('curves', 'resformer neutreno neutreno_resformer denseformer', 'Models compared'),
        Panel(
            'entropy',
            'vanilla resformer neutreno denseformer svformer',
            'How evenly attention is spread over tokens',
        ),
    ),
    'fig2': Figure(
        'Whose queries, keys and values a layer uses',
        Panel('wiring', 'vanilla neutreno denseformer resformer svformer'),
    ),
    'fig3': Figure('Cross-layer attention and its approximations', Panel('mapping', 'vanilla')),
    'fig4': Figure(
        'Sharing keys or values every two layers',
        Panel('curves', 'vanilla+share_k=2 svformer+share_v=2 cla'),
    ),
    'fig5': Figure(
        'ResFormer by sequence length and by size',
        Panel('curves', 'resformer', 'ResFormer by sequence length', length=SOME_LENGTHS),
        Panel('scaling', 'vanilla resformer', 'Loss by size', size=SIZES),
        Panel('curves', 'resformer', 'ResFormer by size', size=SIZES),
    ),
    'fig6': Figure(
        'Residual on queries, keys or values',
        Panel('curves', 'vanilla+q_residual=True vanilla+k_residual=True resformer'),
    ),
    'fig7': Figure(
        'How the source values are mapped',
        Panel(
            'curves',
            'resformer resformer+residual_map=identity '
            'resformer+residual_map=identity+v_residual=all resformer+residual_map=cross',
        ),
    ),
    'fig8': Figure(
        'Which layers are the source',
        Panel('curves', 'resformer resformer+v_residual=previous resformer+v_residual=all'),
    ),
    'fig9': Figure('Spectra of the values', Panel('spectrum', 'vanilla resformer')),
    'fig10': Figure(
        'Less KV cache: half, and an eighth',
        Panel('curves', 'svformer gqa cla', 'Half the KV cache', length=(2048, LONGEST)),
        Panel('curves', 'svformer_gqa mqa cla_gqa', 'An eighth of the KV cache', length=[LONGEST]),
    ),
    'fig11': Figure(
        'SVFormer by sequence length',
        Panel('curves', 'svformer', 'SVFormer by sequence length', length=LENGTHS),
        Panel('critical', 'svformer', 'Whether vanilla overtakes SVFormer', length=LENGTHS),
    ),
    'fig12a': Figure('SVFormer by learning rate', Panel('curves', 'svformer', rate=(0, 1, 2))),
    'fig12b': Figure('SVFormer by warm-up', Panel('curves', 'svformer', warmup=(0, 1))),
    'fig12c': Figure('SVFormer by size', Panel('curves', 'svformer', size=SIZES)),
    'fig12d': Figure(
        "On GPT-2's architecture",
        Panel('curves', 'svformer gpt2+share_v=True gpt2+v_residual=True'),
    ),
    'fig13': Figure(
        "All layers use the first layer's queries, keys or values",
        Panel('curves', 'vanilla+share_q=True vanilla+share_k=True svformer'),
    ),
    'fig14': Figure(
        "SVFormer's anchors: layers that have their own values",
        Panel('curves', 'svformer+share_v=2 svformer+share_v=4 svformer'),
    ),
    'fig15': Figure('Similarity of tokens', Panel('similarity', 'vanilla resformer svformer')),
}


def number_of(name):
    """Fig. 12a of fig12a, Table 1 of table1."""
    return name.replace('fig', 'Fig. ').replace('table', 'Table ')


# --- claims -------------------------------------------------------------------------------------

# Signs of a claim: how our metric compares with theirs, as printed.
SIGNS = {'<': 'below', '>': 'above', '>=': 'not below'}

# What a claim is about.
METRICS = {
    'early loss': 'training loss in the first tenth of the steps',
    'lead': "validation loss at the end, minus vanilla's in the same setting",
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
    metric: str = 'validation loss'  # of METRICS
    caveat: str = ''  # why a verdict would say too much, whatever p is

    @property
    def contrast(self):
        return str(self.ours), str(self.theirs), self.metric


def statement(figure, where, says, contrasts, metric='validation loss', caveat='', **at):
    """A Claim for each contrast of one statement of the paper, at each value of a setting.

    contrasts: two models and the sign between them, as in 'resformer < vanilla', and ; between two.
    """
    for contrast in contrasts.split(';'):
        ours, sign, theirs = contrast.split()
        for our, their in zip(arms_at(ours, **at), arms_at(theirs, **at), strict=True):
            yield Claim(figure, where, says, our, sign, their, metric, caveat)


CLAIMS = [
    # ResFormer and the others
    *statement(
        'table1',
        'Table 1',
        'ResFormer answers 0.355 of the questions, vanilla 0.333',
        'resformer > vanilla',
        'accuracy',
    ),
    *statement(
        'table1',
        'Table 1',
        'ResFormer answers 0.350 of the questions, vanilla 0.328, trained at length 64,000',
        'resformer > vanilla',
        'accuracy',
        length=[LONGEST],
    ),
    *statement(
        'fig1',
        'abstract, Section 4.2, Fig. 1 left',
        'ResFormer is better than vanilla, NeuTRENO and DenseFormer',
        'resformer < vanilla; resformer < neutreno; resformer < denseformer',
    ),
    *statement(
        'fig1',
        'Section 4.2, Fig. 1 left',
        'NeuTRENO on top of ResFormer is better still',
        'neutreno_resformer < resformer',
    ),
    *statement(
        'table5',
        'Table 5',
        'ResFormer is below vanilla at every size, and in every domain: 2.7117 and 2.7389 at 82M, 2.4692 '
        'and 2.5015 at 180M, 2.2537 and 2.2806 at 468M',
        'resformer < vanilla',
        size=SIZES[1:],
    ),
    *statement(
        'fig5',
        'Section 4.2, Fig. 5 left',
        'ResFormer is below vanilla throughout training, so also at the end, at every sequence length',
        'resformer < vanilla',
        length=SOME_LENGTHS,
    ),
    # attention concentration and what goes with it
    *statement(
        'fig1',
        'Section 4.5, Fig. 1 middle',
        'attention concentrates more and more with depth in vanilla',
        'vanilla < vanilla',
        'entropy with depth',
    ),
    *statement(
        'fig1',
        'abstract, Section 4.5, Fig. 1 middle',
        'attention concentrates less in ResFormer than in vanilla',
        'vanilla < resformer',
        'entropy',
    ),
    *statement(
        'fig3',
        'Section 3.2, Fig. 3',
        "the layer's own attention matrix approximates cross-layer attention better than the identity",
        'vanilla < vanilla',
        'mapping',
    ),
    *statement(
        'fig9',
        'Section 4.5, Fig. 9',
        'the values of most layers have larger eigenvalues in ResFormer',
        'resformer > vanilla',
        'eigenvalue, attended',
        'this metric was chosen after the first look at the runs',
    ),
    *statement(
        'fig9',
        'Section 4.5, Fig. 9',
        'the values of most layers have larger eigenvalues in ResFormer',
        'resformer > vanilla',
        'eigenvalue, projected',
    ),
    *statement(
        'fig15',
        'Fig. 15 left, which no sentence states',
        'tokens are less alike in ResFormer than in vanilla',
        'resformer < vanilla',
        'similarity',
    ),
    # ablations of ResFormer
    *statement(
        'fig6',
        'Section 4.3, Fig. 6',
        'only a residual on values helps',
        'resformer < vanilla; resformer < vanilla+q_residual=True; resformer < vanilla+k_residual=True; '
        'vanilla+q_residual=True >= vanilla; vanilla+k_residual=True >= vanilla',
    ),
    *statement(
        'fig7',
        'Section 4.3, Fig. 7',
        'the identity map does poorly (source: the first layer; Eq. 6 as printed)',
        'resformer < resformer+residual_map=identity; '
        'resformer < resformer+residual_map=identity+v_residual=all',
    ),
    *statement(
        'fig7',
        'Section 4.3, Fig. 7',
        'ResFormer ends even below cross-layer attention',
        'resformer < resformer+residual_map=cross',
    ),
    *statement(
        'fig8',
        'Section 4.3, Fig. 8',
        'the first layer is a better source than the previous one or all earlier ones',
        'resformer < resformer+v_residual=previous; resformer < resformer+v_residual=all',
    ),
    *statement(
        'the revision',
        'the revision, Fig. 8 and Section 4.2',
        'V_n + lambda V_1 is better than vanilla at any lambda, and best at 2',
        'resformer+residual_lambda=(0.2,1.0) < vanilla; '
        'constant_resformer < resformer+residual_lambda=(1.0,1.0); '
        'constant_resformer < resformer+residual_lambda=(5.0,1.0)',
    ),
    *statement(
        'v5',
        'v5, validation losses at 82M: 2.712, 2.705, 2.700, 2.687',
        'learned weights are better than uniform ones, constant (2, 1) better, sparse with 5 best',
        'learned_resformer < resformer; constant_resformer < learned_resformer; '
        'sparse_resformer < constant_resformer',
    ),
    # SVFormer
    *statement(
        'fig4',
        'Section 3.5, Fig. 4',
        'sharing the values of every two layers costs less than sharing their keys',
        'svformer+share_v=2 < vanilla+share_k=2',
    ),
    *statement(
        'fig10',
        'abstract, Section 4.6, Fig. 10',
        'at length 64,000 SVFormer is better than GQA and CLA',
        'svformer < gqa; svformer < cla',
        length=[LONGEST],
    ),
    *statement(
        'fig10',
        'Section 4.6, Fig. 10',
        'at length 2,048 SVFormer is worse than GQA',
        'svformer > gqa',
        caveat='runs too short to say whether vanilla overtakes SVFormer are too short for this',
    ),
    *statement(
        'fig11',
        'abstract, Section 4.6, Fig. 11 left',
        'SVFormer learns faster than vanilla at first',
        'svformer < vanilla',
        'early loss',
        length=LENGTHS,
    ),
    *statement(
        'fig11',
        'Section 4.6, Fig. 11',
        'SVFormer is overtaken by vanilla in the end (at length 64,000: predicted, after training)',
        'svformer > vanilla',
        'overtaken',
        length=LENGTHS[:-1],
    ),
    *[
        Claim(
            'fig11',
            'Section 4.6, Fig. 11 right',
            'the longer the sequence, the later is SVFormer overtaken',
            shorter,
            '<',
            longer,
            'critical step',
        )
        for shorter, longer in itertools.pairwise(arms_at('svformer', length=LENGTHS))
    ],
    *[
        Claim(
            'fig12a',
            'Section 4.7, Fig. 12a',
            'SVFormer gains more from a smaller learning rate than vanilla does',
            smaller,
            '<',
            larger,
            'lead',
        )
        for larger, smaller in itertools.pairwise(arms_at('svformer', rate=(0, 1, 2)))
    ],
    *statement(
        'fig13',
        'Section 4.8, Fig. 13',
        "sharing all of the first layer's queries or keys costs much; similar to Fig. 4",
        'vanilla+share_q=True > vanilla; vanilla+share_k=True > vanilla; '
        'svformer < vanilla+share_q=True; svformer < vanilla+share_k=True',
    ),
    *statement(
        'fig14',
        'Section 4.8, Fig. 14',
        'the more anchors, the better is SVFormer',
        'svformer+share_v=4 < svformer; svformer+share_v=2 < svformer+share_v=4',
    ),
]
