"""
A run that train.py has left in a folder: its settings, its log, whether it has finished, its facts.

    state = read_state('out/run')
    state.kind, state.detail          'finished', or what else it is, and why
    state.config                      what config.json says: settings, origin, data, provenance
    state.losses                      {domain: loss, 'mean': ...}, the last evaluation of a finished run
    state.training()                  {step: training loss}
    state.model                       GPTConfig; None of a run whose settings are not today's
    state.facts                       {name: value} of all that decides the run's numbers
    state.code                        what the code was that trained it

    difference(a.facts, b.facts, but=('seed',))     None, or the first (name, value, other value)

Facts are the decisive settings of TrainConfig and GPTConfig, those of a fork that this code does not
know, `origin` (scratch, or whose weights the run began with), `resumed` (how its settings changed on
the way), and, in runs that record them, `data` (the fingerprint of the token files), `domains` (of the
last evaluation), how the run rounds (ROUNDING) and `code` (lib.rundir.code_fingerprint(); of an older
run, its commit). Two facts are stated so that they are the same where they mean the same:
`min_lr / learning_rate`, and `eval_iters * batch_size`, the rows that are evaluated (0: all).

Everybody who asks whether two runs are the same, but for something, asks difference(). A run that is
still to be trained has facts, too: facts(asdict(settings) | asdict(config)).
"""

import functools
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path

from configurator import convert, hints_of

from comparison.forms import PROVENANCE, check_types, parse_line
from lib.files import as_json, first_line, unreadable
from lib.rundir import FACTS, failure_file, is_evaluation
from model import GPTConfig, refuse
from train import NOT_FINITE, TrainConfig

# --- facts ----------------------------------------------------------------------------------------

# Settings that say where a run happens and how it is watched. Two runs that differ only in these are
# the same run. dtype, compile and attention change how its numbers are rounded, which is usually the
# machine's choice: see ROUNDING.
INCIDENTAL = frozenset(
    'out_dir init_from verify_data eval_interval log_interval save_interval '
    'keep_checkpoints save_steps max_skipped wandb_log wandb_project wandb_run_name device dtype '
    'compile attention activation_memory_budget activation_checkpointing backend'.split()
)
# Settings that may change when a run is resumed, because its steps stay what they were: besides those
# above, where the data are, how a step is cut into micro-batches, and how much an evaluation reads (only
# the last evaluation is the run's result). Every other setting acts while steps are taken, and so does
# one that you add to TrainConfig, unless it is named in one of the two.
HARMLESS = INCIDENTAL | {'dataset', 'batch_size', 'gradient_accumulation_steps', 'eval_iters'}

# How a run rounds. It is the machine's choice, unless it is what a comparison is about.
ROUNDING = ('dtype', 'compile', 'attention')
# Facts that older runs do not record. Where one of two runs lacks such a fact, they do not differ in it.
RECORDED = ('data', 'domains', *ROUNDING, 'code')

MIXED_CODE = '--mixed_code=True lets runs of different code share a verdict'


def facts(values, entries=()):
    """{name: value}, as JSON has values: all that decides the numbers of a run.

    values: a config.json, or asdict() of a TrainConfig and a GPTConfig. entries: the run's log.
    A setting that the file lacks was added since, with a default that changes nothing.
    """
    defaults = default_settings()
    settings = {name: values.get(name, default) for name, default in defaults.items()}
    rate, least = settings['learning_rate'], settings.pop('min_lr')
    settings['min_lr / learning_rate'] = least / rate if rate else 0.0
    settings['eval_iters * batch_size'] = settings.pop('eval_iters') * settings['batch_size']

    return as_json(
        {
            **settings,
            **unknown_settings(values),
            'origin': values.get('origin', 'scratch'),
            'resumed': changes_on_the_way(entries),
            **{name: values.get(name) for name in RECORDED},
            'domains': domains_of(entries),
            'code': code_of(values, entries),
        }
    )


def unknown_settings(values):
    """{setting: value} of a fork's settings, which this code does not know, without those that are off."""
    known = default_settings().keys() | INCIDENTAL | FACTS
    return {name: value for name, value in values.items() if value and name not in known}


@functools.cache
def default_settings():
    """{name: value} of the settings that decide a run's numbers, in a run without any arguments."""
    values = asdict(TrainConfig()) | asdict(GPTConfig())
    return {name: value for name, value in values.items() if name not in INCIDENTAL}


def parts_of(values, entries):
    """[what a part of a run was made with]: of one that was resumed, the log has the older parts."""
    return [*(entry['before'] for entry in entries if entry.get('before')), values]


def domains_of(entries):
    """The names of the domains of a run's last evaluation; None where a log says none."""
    for entry in reversed(entries):
        if 'val' in entry:
            return sorted(entry['val'].keys() - {'mean'}) or None


def code_of(values, entries):
    """What the code of a run was: of one that went on with other code, 'first, then second'."""
    codes = [part.get('code') or part.get('commit') for part in parts_of(values, entries)]
    return ', then '.join(dict.fromkeys(map(str, filter(None, codes)))) or None


def changes_on_the_way(entries):
    """['step 12: learning_rate=0.02, before 0.01', ...]: how a run's settings changed when it was
    resumed, as far as that matters."""
    words = []
    for entry in entries:
        for name, (old, new) in (entry.get('changed') or {}).items():
            # A setting that was off before and after, such as one that this code no longer has.
            is_off = not old and not new
            if name not in HARMLESS and not is_off:
                words.append(f'step {entry["step"]}: {name}={new!r}, before {old!r}')
    return words


def differences(a, b, but=(), only=()):
    """{name: (value, other value)} of the facts in which two runs differ.

    a, b: {name: value}. but: names of facts that may differ. only: those that count; (): all.
    """
    result = {}
    for name in only or {**a, **b}:  # in this order
        value, other = a.get(name), b.get(name)
        is_unrecorded = name in RECORDED and None in (value, other)
        if name not in but and not is_unrecorded and not same_value(value, other):
            result[name] = value, other
    return result


def difference(a, b, but=(), only=()):
    """The first (name, value, other value) of differences(), or None. Other code is named last: whoever
    lets it differ should not learn of the rest only then."""
    found = differences(a, b, but, only)
    name = min(found, key=lambda name: name == 'code', default=None)
    return (name, *found[name]) if found else None


def disagreement(ours, theirs, but=(), only=()):
    """The difference() of two States in words; '' where there is none."""
    found = difference(ours.facts, theirs.facts, but, only)
    if not found:
        return ''
    words = '{} and {} differ in {}: {!r} and {!r}'.format(ours.folder, theirs.folder, *found)
    return f'{words}; {MIXED_CODE}' if found[0] == 'code' else words


def same_value(a, b):
    """Whether two settings are the same, but for the last bits of a float."""
    if {type(a), type(b)} <= {int, float}:
        return math.isclose(a, b, rel_tol=1e-9, abs_tol=0.0)
    return a == b


# --- what a run's folder holds --------------------------------------------------------------------


@dataclass
class State:
    """kind: one of these.

    finished             its last evaluation is in the log, and train.py saves before it evaluates
    missing, unfinished  it has not begun, or not reached its last evaluation
    damaged              its log cannot be read; training resumes it, and leaves out the damaged line
    failed               training ended with an error
    diverged             its numbers were not finite at the end, or so long that training gave up
    foreign              it is not the run that was wanted
    """

    folder: Path
    kind: str
    detail: str = ''
    entries: list = field(default_factory=list)
    config: dict = field(default_factory=dict)
    model: GPTConfig | None = None  # None where it has older settings or a fork's
    losses: dict = field(default_factory=dict)  # of a finished run: final_losses()

    @property
    def reason(self):
        """Why it has not finished."""
        return f'{self.kind}: {self.detail}'.removesuffix(': ')

    @functools.cached_property
    def facts(self):
        return facts(self.config, self.entries)

    @property
    def code(self):
        return code_of(self.config, self.entries)

    def training(self):
        """{step: training loss}, where it is finite."""
        losses = {}
        for entry in self.entries:
            loss = entry.get('loss')
            if loss is not None and math.isfinite(loss):
                losses[entry['step']] = loss
        return losses


def model_of(config, path):
    """The GPTConfig of a run's settings, which `path` holds; None where some of them mean nothing here."""
    if unknown_settings(config):
        return None
    names = asdict(GPTConfig())
    with unreadable(f'{path} does not say the settings of a model'):
        model = GPTConfig.saved({name: config[name] for name in config if name in names})
        for name, value in vars(model).items():
            refuse(isinstance(value, int) and value >= 2**31, f'{name}={value} is too large')
    return model


def read_state(folder):
    """The State of a run, which may be another one than is wanted."""
    folder = Path(folder)
    log, failure = folder / 'log.jsonl', failure_file(folder)
    failed = failure.read_text(errors='replace').strip() if failure.exists() else ''
    end = 'diverged' if NOT_FINITE in failed else 'failed'
    if not log.exists():
        return State(folder, end if failed else 'missing', failed)
    state = State(folder, 'unfinished')
    losses = {}
    try:
        state.config = read_run_config(folder / 'config.json')
        state.entries = read_entries(log)
        state.model = model_of(state.config, folder / 'config.json')
        losses = final_losses(state.entries, state.config['max_iters'])
    except (ValueError, OSError) as error:
        state.kind, state.detail = 'damaged', first_line(error)

    if losses and all(x is not None and math.isfinite(x) for x in losses.values()):
        state.kind, state.losses = 'finished', losses
    elif losses:
        state.kind, state.detail = 'diverged', 'its validation loss is not finite'
    elif failed:
        state.kind, state.detail = end, failed
    elif state.kind == 'unfinished':
        step = max((entry['step'] for entry in state.entries), default=0)
        state.detail = f'step {step} of {state.config["max_iters"]}'
    return state


def read_run_config(path):
    """What a config.json says of its run. Raises OSError or ValueError."""
    with unreadable(f'{path} does not say the settings of a run'):
        config = json.loads(path.read_text(errors='replace'))
        for name, hint in hints_of([TrainConfig, GPTConfig]).items():
            if name in config:
                config[name] = convert(config[name], hint, name)
        check_types({name: config[name] for name in FACTS & config.keys()}, PROVENANCE)
        if not {'max_iters', 'seed', 'learning_rate'} <= config.keys():
            raise KeyError('max_iters, seed, learning_rate')
    return config


def read_entries(path):
    """The lines of a log.jsonl, [{'step': ...}]. ValueError names a damaged one."""
    entries = []
    for number, line in enumerate(path.read_text(errors='replace').splitlines(), 1):
        with unreadable(f'{path}, line {number}: not a line of a training log'):
            entries.append(parse_line(line))
    return entries


def final_losses(entries, steps):
    """The last evaluation, {domain: loss, ..., 'mean': ...}; {} where it is not there yet."""
    for entry in reversed(entries):
        if is_evaluation(entry, steps):
            return entry['val']
    return {}
