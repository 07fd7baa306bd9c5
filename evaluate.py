"""
Scores finished runs: their loss per domain (the paper's Table 5) and six zero-shot tasks (Table 1).

$ python evaluate.py loss --out_dir=out/vanilla_82m out/resformer_82m --out=losses.json
$ torchrun --nproc_per_node=8 evaluate.py loss out/vanilla_82m out/resformer_82m  # the same numbers
$ python evaluate.py tasks --out_dir=out/resformer_82m --tasks=hellaswag,piqa --data_dir=FOLDER
$ python evaluate.py tasks --help                                                 # every setting

A standard error here says how well the text, or the items of a task, measure this one run. It does not
say how runs of other seeds scatter, which is more: compare.py does. tasks.py says where the tasks'
items come from.
"""

import functools
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from configurator import choose, one_line_errors
from data import Dataset, read_windows, windows
from machine import Machine
from model import LOSS_CHUNK
from rundir import (
    advise_on_memory,
    check_out,
    check_tokenizer,
    compare_data,
    find_weights,
    load_run,
    provenance,
    save_numbers,
)
from tables import markdown_table
from tasks import TASKS, check_names, harness_tasks, task_manager

# What the standard errors are over; every table and JSON file says so.
LOSS_ERRORS = 'over windows of one run, not over seeds'
TASK_ERRORS = 'over items of one run, not over seeds'

# A task's accuracy would not show it: the argmax over NaN is the first choice.
NOT_FINITE = 'its log-probabilities are not finite; try --dtype=float32 or --dtype=bfloat16'

# Texts of the tasks are padded to a multiple of so many tokens: kernels are chosen, and memory is
# set aside, for each new shape.
PADDED_TO = 64


@dataclass
class EvaluateConfig:
    out_dir: str = ''  # the first run; '': the first plain argument, or out/run if there is none
    runs: tuple = ()  # the other runs, which are plain arguments
    batch_size: int = 32  # windows or texts at once
    device: str = 'auto'  # as in train.py
    dtype: str = 'auto'  # as in train.py
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of each run's dataset
    out: str = ''  # write the numbers here, as JSON

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f'batch_size={self.batch_size} must be at least 1')
        if self.out:
            check_out(self.out)
            folder = Path(self.out).parent
            if not folder.is_dir():
                raise FileNotFoundError(f'there is no folder {folder} to write --out to; make it')

    def all_runs(self):
        runs = list(self.runs)
        if self.out_dir:
            runs.insert(0, self.out_dir)
        return runs or ['out/run']


@dataclass
class LossConfig(EvaluateConfig):
    dataset: str = ''  # a folder in data/; '': the one the run was trained on


@dataclass
class TasksConfig(EvaluateConfig):
    tasks: str = ','.join(TASKS)  # which, separated by commas
    data_dir: str = ''  # a folder with the tasks' files; '': the hub
    limit: int = 0  # only the first items of each task; 0: all

    def __post_init__(self):
        super().__post_init__()
        if self.limit < 0:
            raise ValueError(f'limit={self.limit} must not be negative')
        check_names(self.tasks.split(','), self.data_dir)


def log_probabilities(model, hidden, targets, n_vocab=None):
    """(log-probability of each target, whether it is the likeliest), each (N,), in fp32.

    hidden (N, C): what lm_head reads; targets (N,); n_vocab: the probability is shared among the
    first n_vocab ids only.
    """
    chunks = hidden.split(LOSS_CHUNK)
    values, hits = [], []
    for rows, ids in zip(chunks, targets.split(LOSS_CHUNK), strict=True):
        logits = model.lm_head(rows)[:, :n_vocab].float()
        values.append(-F.cross_entropy(logits, ids, reduction='none'))
        hits.append(logits.argmax(dim=1) == ids)
    return torch.cat(values), torch.cat(hits)


# --- loss per domain -----------------------------------------------------------------------------


def compare_losses(runs, settings, machine):
    """The losses of several runs, as a dict for JSON: the provenance, and under 'runs' {run: report}.

    A report has, for each of its `domains` and for their `mean`, the `loss` in nats per token, its
    `standard_error` over windows of one run (not over seeds), and the `bits_per_byte`. A run that
    reads the same windows as the first also has `minus_first`, its difference from the first. It is
    paired window by window, because most of the spread is common to all runs.
    """
    runs = [str(run) for run in runs]
    first = runs[0]
    reports, losses = {}, {}
    numbers = {**provenance(machine), 'standard_errors': LOSS_ERRORS, 'runs': reports}
    for run in runs:
        reports[run], losses[run] = run_losses(run, settings, machine)
        same_windows = all(
            reports[run][name] == reports[first][name] for name in ('dataset', 'block_size')
        )
        if run != first and same_windows:
            minus_first = difference(reports[run], losses[run], reports[first], losses[first])
            reports[run]['minus_first'] = minus_first
        save_numbers(numbers, settings, machine)  # a later run may fail
    return numbers


def run_losses(run, settings, machine):
    """(the report of a run, a dict for JSON; its domain_losses)."""
    model, tokenizer, checkpoint = load_run(run, settings.tokenizer)
    if checkpoint is None and not settings.dataset:
        raise ValueError(f'{run} is not a run of train.py: say on which --dataset')
    dataset = Dataset(settings.dataset or checkpoint['settings']['dataset'])
    sha256 = dataset.meta['tokenizer']['sha256']
    check_tokenizer(run, tokenizer.sha256, sha256, f'that of {dataset.folder}')
    # A checkpoint may be older than this record.
    if not settings.dataset and 'sha256' in checkpoint['data']:
        advice = f'; to evaluate on it nevertheless, give --dataset={dataset.folder.name}'
        compare_data(checkpoint, dataset, advice)
    if machine.is_first:
        dataset.verify(['validation'])

    losses = domain_losses(model.to(machine.device), dataset, settings, machine, run)
    if not all(np.isfinite(sums).all() for sums in losses.values()):
        raise ValueError(f'{run}: {NOT_FINITE}')
    domains = {}
    for domain, sums in losses.items():
        total, tokens = sums.sum(axis=0)
        n_bytes = dataset.meta['splits']['validation'][domain]['bytes']
        domains[domain] = {
            'loss': total / tokens,
            'standard_error': standard_error(*sums.T),
            'bits_per_byte': total / math.log(2) / n_bytes,
            'tokens': int(tokens),
        }
    report = {
        'domains': domains,
        'mean': {
            'loss': mean_of(domains, 'loss'),
            'bits_per_byte': mean_of(domains, 'bits_per_byte'),
            'standard_error': error_of_mean(domains),
        },
        'dataset': str(dataset.folder),
        'data': dataset.fingerprint(),
        'step': checkpoint['step'] if checkpoint else None,
        'block_size': model.config.block_size,
    }
    return report, losses


@torch.no_grad()
def domain_losses(model, dataset, settings, machine, label=''):
    """{domain: (windows, 2) float64}: the summed loss and the number of predictions of each window.

    The windows of block_size predictions cover the whole validation split.
    """
    T = model.config.block_size
    domains = dataset.meta['splits']['validation']
    counts = {domain: windows(dataset, domain, T) for domain in domains}
    stride = machine.world_size * settings.batch_size
    losses = {}
    silent = not machine.is_first
    with tqdm(total=sum(counts.values()), disable=silent, unit='window', desc=label) as bar:
        for domain, count in counts.items():
            sums = torch.zeros((count, 2), dtype=torch.float64)
            for first in range(machine.rank * settings.batch_size, count, stride):
                rows = range(first, min(first + settings.batch_size, count))
                x, y = read_windows(dataset, domain, rows, T)
                sums[first : rows.stop] = window_losses(model, x, y, machine)
                bar.update(min(stride, count - first))  # those of all processes
            if machine.distributed:
                sums = machine.sum(sums.to(machine.device)).cpu()
            losses[domain] = sums.numpy()
    return losses


def window_losses(model, x, y, machine):
    """(B, 2) float64: the summed loss and the number of predictions of windows x, y (B, T)."""
    x, y = x.to(machine.device), y.to(machine.device)
    with machine.autocast():
        hidden = model.hidden(x).flatten(0, 1)
        values, _ = log_probabilities(model, hidden, y.flatten().clamp(min=0))
    is_prediction = (y != -1).cpu().double()
    losses = -(values.view_as(y).cpu() * is_prediction)
    return torch.stack((losses.sum(dim=1), is_prediction.sum(dim=1)), dim=1)


def standard_error(sums, counts):
    """The standard error of sums.sum() / counts.sum() over windows, of which longer ones weigh more.

    None for a single window.
    """
    if len(sums) < 2:
        return None
    residuals = sums - counts * (sums.sum() / counts.sum())
    return float(residuals.std(ddof=1) * math.sqrt(len(residuals)) / counts.sum())


def mean_of(domains, name):
    return float(np.mean([entry[name] for entry in domains.values()]))


def error_of_mean(domains):
    """The standard error of the mean over domains; None where a domain has none."""
    errors = [entry['standard_error'] for entry in domains.values()]
    if None in errors:
        return None
    return math.sqrt(sum(error * error for error in errors)) / len(errors)


def difference(report, losses, first_report, first_losses):
    """{domain or 'mean': loss and standard error} of a run minus those of the first run."""
    domains = {}
    for domain, sums in losses.items():
        differences = sums[:, 0] - first_losses[domain][:, 0]
        first_loss = first_report['domains'][domain]['loss']
        domains[domain] = {
            'loss': report['domains'][domain]['loss'] - first_loss,
            'standard_error': standard_error(differences, sums[:, 1]),
        }
    mean = {
        'loss': report['mean']['loss'] - first_report['mean']['loss'],
        'standard_error': error_of_mean(domains),
    }
    return {**domains, 'mean': mean}


# --- zero-shot tasks -----------------------------------------------------------------------------


def evaluate_tasks(runs, settings, machine):
    """Zero-shot scores of several runs: (a dict for JSON, {run: the harness's samples}).

    The dict has the provenance, and under 'runs' the scores of each run: for each of its `tasks`, and
    as their `average`, the accuracy. Standard errors are over items of one run, not over seeds.
    """
    try:
        from lm_eval import simple_evaluate
    except ImportError:
        raise OSError(
            'evaluate.py tasks needs lm-evaluation-harness: pip install lm_eval'
        ) from None

    reports, samples = {}, {}
    numbers = {
        **provenance(machine),
        'standard_errors': TASK_ERRORS,
        'limit': settings.limit,
        # A name, not a path, which tells of somebody's machine. None: from the hub.
        'data': Path(settings.data_dir).resolve().name if settings.data_dir else None,
        'runs': reports,
    }
    with tempfile.TemporaryDirectory() as folder:
        tasks = load_tasks(settings, folder)
        # A task may be defined with examples, and would be called zero-shot.
        ask = functools.partial(
            simple_evaluate,
            tasks=tasks,
            num_fewshot=0,
            limit=settings.limit or None,
            task_manager=task_manager(),
        )
        for run in map(str, runs):
            reports[run], samples[run] = run_scores(run, ask, settings, machine)
            save_numbers(numbers, settings, machine)  # a later run may fail
    return numbers, samples


def load_tasks(settings, folder):
    """harness_tasks() of the settings. OSError where the hub cannot be reached."""
    try:
        return harness_tasks(settings.tasks.split(','), settings.data_dir, folder)
    except ConnectionError as error:
        reason = ' '.join(str(error).split())[:200]
        raise OSError(
            f'cannot get {settings.tasks} from the hub ({reason}); give local files with --data_dir'
        ) from error


def run_scores(run, ask, settings, machine):
    """(the report of a run, a dict for JSON; the harness's samples).

    ask: the harness's simple_evaluate() on the tasks.
    """
    model, tokenizer, checkpoint = load_run(run, settings.tokenizer)
    lm = make_lm(model.to(machine.device), tokenizer, settings, machine)
    output = ask(lm)

    scores = {name: task_scores(output, name) for name in settings.tasks.split(',')}
    for name, entry in scores.items():
        entry |= count_cuts(output['samples'][name], lm.lengths, model.config.block_size)
    report = {
        'tasks': scores,
        'average': mean_of(scores, 'acc'),
        'step': checkpoint['step'] if checkpoint else None,
        'block_size': model.config.block_size,
    }
    return report, output['samples']


def task_scores(output, name):
    """What the harness says of one task, and what guessing would score there."""
    choices = [len(sample['arguments']) for sample in output['samples'][name]]
    scores = {'items': len(choices), 'chance': float(np.mean([1 / n for n in choices]))}
    for metric in ('acc', 'acc_stderr', 'acc_norm', 'acc_norm_stderr'):
        value = output['results'][name].get(f'{metric},none')
        if isinstance(value, float):  # the error of a single item is 'N/A'
            scores[metric] = value
    return scores


def count_cuts(samples, lengths, block_size):
    """How many choices of a task there are, of how many the text was cut, and of these the answer.

    lengths: those of make_lm(). The counts are of what score_continuations() does.
    """
    cuts = {'choices': 0, 'cut_choices': 0, 'cut_answers': 0}
    for sample in samples:
        for texts in sample['arguments']:
            context, continuation = lengths[tuple(texts)]
            cuts['choices'] += 1
            if context + continuation > block_size + 1:
                cuts['cut_choices'] += 1
            if continuation > block_size:
                cuts['cut_answers'] += 1
    return cuts


def make_lm(model, tokenizer, settings, machine):
    """The model as the harness's LM.

    Its `lengths` are, for all texts that it has scored, {(context, continuation): their tokens}.
    """
    from lm_eval.api.model import TemplateLM

    class LM(TemplateLM):
        eot_token_id = tokenizer.eot
        lengths = {}

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string).tolist()

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
            pairs = []
            for texts, context, continuation in requests:
                pairs.append((context, continuation))
                self.lengths[texts] = len(context), len(continuation)
            return score_continuations(
                model, pairs, tokenizer.n_vocab, settings.batch_size, machine, disable_tqdm
            )

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise NotImplementedError('perplexity of texts: evaluate.py loss')

        def generate_until(self, requests, disable_tqdm=False):
            raise NotImplementedError('tasks that generate text are not part of Table 1')

    return LM()


def score_continuations(model, pairs, n_vocab, batch_size, machine, silent=False):
    """[(log-probability of a continuation, whether each of its tokens is the likeliest)].

    pairs: [(tokens of the context, of the continuation)]. Of a text of more than block_size + 1
    tokens, the model sees only the end, as in the harness's own wrapper. That wrapper refuses a
    continuation of more than block_size tokens; here, its last block_size tokens are scored, so that
    byte models can be evaluated. count_cuts() counts both.
    """
    longest = model.config.block_size + 1
    texts = [(context + continuation)[-longest:] for context, continuation in pairs]
    order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # the largest batch first
    answers = [None] * len(texts)
    for first in tqdm(range(0, len(order), batch_size), disable=silent, unit='batch'):
        batch = order[first : first + batch_size]
        counts = [min(len(pairs[i][1]), len(texts[i]) - 1) for i in batch]
        scores = score_batch(model, [texts[i] for i in batch], counts, n_vocab, machine)
        for i, score in zip(batch, scores, strict=True):
            answers[i] = score
    return answers


@torch.no_grad()
def score_batch(model, texts, counts, n_vocab, machine):
    """[(log-probability of the last counts[i] tokens of texts[i], whether each is the likeliest)].

    Raises ValueError where a log-probability is not finite.
    """
    longest = max(1, max(len(text) for text in texts) - 1)
    width = min(math.ceil(longest / PADDED_TO) * PADDED_TO, model.config.block_size)
    idx = torch.zeros((len(texts), width), dtype=torch.int64)
    targets = []
    for row, text, count in zip(idx, texts, counts, strict=True):
        row[: len(text) - 1] = torch.tensor(text[:-1])
        targets += text[len(text) - count :]
    targets = torch.tensor(targets, dtype=torch.int64, device=machine.device)

    with machine.autocast():
        hidden = model.hidden(idx.to(machine.device))
        ends = []
        for row, text, count in zip(hidden, texts, counts, strict=True):
            end = len(text) - 1
            ends.append(row[end - count : end])
        values, hits = log_probabilities(model, torch.cat(ends), targets, n_vocab)

    if not values.isfinite().all():
        raise ValueError(NOT_FINITE)
    values = values.double().cpu().split(counts)
    hits = hits.cpu().split(counts)
    return [(value.sum().item(), bool(hit.all())) for value, hit in zip(values, hits, strict=True)]


# --- tables --------------------------------------------------------------------------------------


def print_losses(numbers):
    """A Markdown table: a row per domain, and per run its loss, bits per byte and difference."""
    reports = numbers['runs'].values()
    head = ['domain']
    for run, report in numbers['runs'].items():
        step = report['step']
        head.append(run if step is None else f'{run}, step {step:,}')
        head.append('bits/byte')
        if 'minus_first' in report:
            head.append('minus first')

    rows = []
    domains = dict.fromkeys(domain for report in reports for domain in report['domains'])
    for domain in [*domains, 'mean']:
        row = [domain]
        for report in reports:
            entry = report['mean'] if domain == 'mean' else report['domains'].get(domain, {})
            row.append(pm(entry.get('loss'), entry.get('standard_error')))
            row.append(pm(entry.get('bits_per_byte'), None))
            if 'minus_first' in report:
                entry = report['minus_first'].get(domain, {})
                row.append(pm(entry.get('loss'), entry.get('standard_error'), '+'))
        rows.append(row)
    print('\n' + markdown_table(head, rows))
    print(f'\n±: standard errors {LOSS_ERRORS}.')


def print_tasks(numbers):
    """A Markdown table: a column per task, two rows per run, and what guessing would score."""
    reports = numbers['runs']
    tasks = next(iter(reports.values()))['tasks']
    rows = []
    for run, report in reports.items():
        for metric in ('acc', 'acc_norm'):
            row = [f'{run}, {metric}']
            for scores in report['tasks'].values():
                text = ''  # winogrande has no acc_norm
                if metric in scores:
                    text = pm(scores[metric], scores.get(f'{metric}_stderr'), digits=3)
                row.append(text)
            row.append(pm(report['average'], None, digits=3) if metric == 'acc' else '')
            rows.append(row)
    chances = [scores['chance'] for scores in tasks.values()]
    chances.append(mean_of(tasks, 'chance'))
    rows.append(['chance', *(pm(chance, None, digits=3) for chance in chances)])

    print('\n' + markdown_table(['', *tasks, 'average'], rows))
    print(f'\n±: standard errors {TASK_ERRORS}.')
    print_cuts(reports)
    if 'hellaswag' in tasks and numbers['data'] is not None:
        advice = 'comparable with other programs on the same file only'
        print(f'HellaSwag from a preprocessed file: {advice}.')


def print_cuts(reports):
    """A line for each run that did not see the whole text of some choices."""
    for run, report in reports.items():
        parts = []
        for name, scores in report['tasks'].items():
            part = f'{name} {scores["cut_choices"]:,} of {scores["choices"]:,} choices'
            if scores['cut_answers']:
                part += f' ({scores["cut_answers"]:,} in the answer itself)'
            if scores['cut_choices']:
                parts.append(part)
        if parts:
            limit = f'to the last {report["block_size"]:,} tokens'
            print(f'Cut for {run} {limit}: {", ".join(parts)}.')


def pm(value, error, sign='', digits=4):
    """'1.8145 ± 0.0033', without an error '1.8145', without a value 'n/a'."""
    if value is None:
        return 'n/a'
    text = f'{value:{sign}.{digits}f}'
    return text if error is None else f'{text} ± {error:.{digits}f}'


def main():
    with one_line_errors(ValueError, OSError):
        modes = {'loss': (LossConfig,), 'tasks': (TasksConfig,)}
        mode, (settings,) = choose(modes, __doc__, plain='runs')
        if mode == 'tasks' and int(os.environ.get('WORLD_SIZE', 1)) > 1:
            raise ValueError(
                'evaluate.py tasks is one process, on one device: start it without torchrun'
            )
        runs = settings.all_runs()
        for run in runs:
            find_weights(run)  # all of them, before the first is evaluated
        machine = Machine(settings.device, settings.dtype, attention='flash')

    errors = one_line_errors(ValueError, OSError, everywhere=True)
    with errors, advise_on_memory('Lower --batch_size.'):
        if mode == 'loss':
            numbers = compare_losses(runs, settings, machine)
            show = print_losses
        else:
            numbers, _ = evaluate_tasks(runs, settings, machine)
            show = print_tasks
        if machine.is_first:
            show(numbers)
    machine.close()


if __name__ == '__main__':
    main()
