"""
Scores finished runs: their loss per domain (the paper's Table 5) and six zero-shot tasks (Table 1).

$ python evaluate.py loss out/vanilla_82m out/resformer_82m --out=losses.json
$ torchrun --nproc_per_node=8 evaluate.py loss out/vanilla_82m out/resformer_82m  # the same numbers
$ python evaluate.py tasks out/resformer_82m --tasks=hellaswag,piqa --data_dir=FOLDER
$ python evaluate.py tasks --help                                                 # every setting

A standard error here says how well the text, or the items of a task, measure this one run. It does not
say how runs of other seeds scatter, which is more: compare.py does. lib/tasks.py says where the tasks'
items come from.
"""

import math
from dataclasses import dataclass
from pathlib import Path

from configurator import choose

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from lib.data import read_windows, windows
from lib.files import one_line_errors, printable
from lib.machine import Machine, advise_on_memory
from lib.rundir import candidates, provenance
from lib.tables import check_out, markdown_table, save_numbers
from lib.tasks import TASKS, harness
from lib.trained import dataset_of, load_run
from model import LOSS_CHUNK, refuse


@dataclass
class EvaluateConfig:
    runs: tuple = ('out/run',)  # runs or checkpoint files: plain arguments
    batch_size: int = 32  # windows or texts at once
    device: str = 'auto'  # as in train.py
    dtype: str = 'auto'  # as in train.py
    tokenizer: str = ''  # as in prepare_slimpajama.py; '': the one of each run's dataset
    out: str = ''  # write the numbers here, as JSON

    def __post_init__(self):
        refuse(not self.runs, 'name the runs')
        refuse(self.batch_size < 1, f'batch_size={self.batch_size} must be at least 1')
        if self.out:
            check_out(self.out)


@dataclass
class LossConfig(EvaluateConfig):
    dataset: str = ''  # a folder in data/; '': the one the run was trained on
    repeats: bool = False  # score what repeats the text before it apart, too: see CLASSES


@dataclass
class TasksConfig(EvaluateConfig):
    tasks: str = ','.join(TASKS)  # which, separated by commas
    data_dir: str = ''  # a folder with the tasks' files; '': the hub

    def __post_init__(self):
        super().__post_init__()
        for name in self.tasks.split(','):
            refuse(
                name not in TASKS,
                f'there is no task {name!r}; the tasks are {", ".join(TASKS)}',
            )


@torch.no_grad()
def score(model, idx, targets, machine, n_vocab=None):
    """(The log-probability of each target, float64, whether each is the likeliest token), (n,) each.

    idx, targets (B, T) int64, -1 where nothing is scored: the n others, row by row. n_vocab: the
    probability is shared among the first n_vocab ids only. Raises ValueError where it is not finite: an
    accuracy would not show it, because the argmax over NaN is the first choice.
    """
    targets = targets.to(machine.device)
    is_target = targets != -1
    ids = targets[is_target]
    values, hits = [], []
    with machine.autocast():
        hidden = model.hidden(idx.to(machine.device))[is_target]
        for rows, labels in zip(hidden.split(LOSS_CHUNK), ids.split(LOSS_CHUNK), strict=True):
            logits = model.lm_head(rows)[:, :n_vocab].float()
            values.append(-F.cross_entropy(logits, labels, reduction='none').cpu())
            hits.append((logits.argmax(dim=1) == labels).cpu())

    values = torch.cat(values).double()
    if not values.isfinite().all():
        raise ValueError(
            'the log-probabilities are not finite; try --dtype=float32 or --dtype=bfloat16'
        )
    return values, torch.cat(hits)


# --- loss per domain -----------------------------------------------------------------------------


def run_losses(run, settings, machine):
    """What a run scores on its validation split, a dict for JSON.

    It has, for each of its `domains` and for their `mean`, the `loss` in nats per token, its
    `standard_error` over windows of this run (not over seeds), and the `bits_per_byte`. With
    settings.repeats, `classes` has the same of each of CLASSES, of the domains that have some of its
    targets: the mean is over these, and what is missing has no targets at all. The bits of a class are
    also over all bytes, so that those of a domain's classes add up to the domain's.
    """
    model, _, checkpoint = load_run(run, settings.tokenizer)
    dataset = dataset_of(checkpoint, settings.dataset)
    losses = domain_losses(model.to(machine.device), dataset, settings, machine, run)
    report = loss_summary({domain: each.sum(axis=1) for domain, each in losses.items()}, dataset)
    if settings.repeats:
        report['classes'] = summaries_by_class(losses, dataset)
    return {
        **report,
        'dataset': str(dataset.folder),
        'data': dataset.fingerprint(),
        **about(model, checkpoint),
    }


def about(model, checkpoint):
    """What each report says of the model. An imported one has no max_iters: None."""
    return {
        'step': checkpoint['step'],
        'max_iters': checkpoint['settings'].get('max_iters'),
        'block_size': model.config.block_size,
    }


# A target whose two tokens before it occurred earlier in the window, in this order, is a copy where it
# followed them there, else misled. All others, such as the first two targets of a window, are the rest.
CLASSES = ('rest', 'misled', 'copy')


def classes_of(ids, targets):
    """The class of each target of a window, its place in CLASSES: (T,) int64 each.

    It follows from the text alone, before any model sees it. An earlier occurrence counts once the
    token after it is there, at the present token at the latest, so it may overlap the two tokens.
    `<|endoftext|>` is an id like others, and what stands across the border of documents counts, because
    attention sees it.
    """
    pairs = np.append(-1, ids[:-1]) * 2**16 + ids  # each token and the one before it, as one number
    triples = pairs * 2**16 + targets
    # Where the three tokens occurred, the first two did, too.
    return stood_before(pairs) + stood_before(triples)


def stood_before(keys):
    """1 for each of these numbers that stands at an earlier place, too, else 0: (n,) each."""
    _, firsts, places = np.unique(keys, return_index=True, return_inverse=True)
    return (firsts[places] < np.arange(len(keys))).astype(int)


def domain_losses(model, dataset, settings, machine, label):
    """{domain: (the summed loss, the number of predictions) of each class and window, (2, classes, windows)
    float64}. Without settings.repeats, all count as the rest.

    The windows of block_size predictions cover the whole validation split.
    """
    T = model.config.block_size
    size = settings.batch_size
    losses = {}
    for domain in dataset.meta['splits']['validation']:
        count = windows(dataset, domain, T)
        sums = np.zeros((2, len(CLASSES), count))
        firsts = range(machine.rank * size, count, machine.world_size * size)
        for first in tqdm(
            firsts, desc=f'{label}, {domain}', disable=None if machine.is_first else True
        ):
            rows = range(first, min(first + size, count))
            x, y = read_windows(dataset, domain, rows, T)
            values, _ = score(model, x, y, machine)
            x, y = x.numpy(), y.numpy()
            classes = np.zeros_like(y)
            if settings.repeats:
                classes = np.stack([classes_of(*window) for window in zip(x, y, strict=True)])
            row, column = np.nonzero(y != -1)
            places = classes[row, column], first + row
            np.add.at(sums[0], places, -values.numpy())
            np.add.at(sums[1], places, 1)
        if machine.distributed:
            sums = machine.sum(torch.from_numpy(sums).to(machine.device)).cpu().numpy()
        losses[domain] = sums
    return losses


def loss_summary(losses, dataset):
    """{'domains': {domain: its losses}, 'mean': their mean}. losses: {domain: (sums, counts) over windows}.

    A window with more predictions weighs more. There is no error of a single window, and where a
    domain has none, no error of the mean over domains.
    """
    domains = {}
    for domain, (sums, counts) in losses.items():
        tokens = counts.sum()
        loss = sums.sum() / tokens
        error = None
        if np.count_nonzero(counts) > 1:
            spread = (sums - counts * loss).std(ddof=1)
            error = float(spread * math.sqrt(len(sums)) / tokens)
        n_bytes = dataset.meta['splits']['validation'][domain]['bytes']
        domains[domain] = {
            'loss': float(loss),
            'standard_error': error,
            'bits_per_byte': float(sums.sum() / math.log(2) / n_bytes),
            'tokens': int(tokens),
        }

    errors = [entry['standard_error'] for entry in domains.values()]
    mean = {
        'loss': mean_of(domains, 'loss'),
        'standard_error': None if None in errors else math.hypot(*errors) / len(errors),
        'bits_per_byte': mean_of(domains, 'bits_per_byte'),
    }
    return {'domains': domains, 'mean': mean}


def summaries_by_class(losses, dataset):
    """{class: loss_summary() of its targets}, of the domains that have some. losses: as domain_losses()"""
    summaries = {}
    for place, name in enumerate(CLASSES):
        parts = {domain: each[:, place] for domain, each in losses.items() if each[1, place].any()}
        if parts:
            summaries[name] = loss_summary(parts, dataset)
    return summaries


def mean_of(entries, name):
    return float(np.mean([entry[name] for entry in entries.values()]))


# --- zero-shot tasks -----------------------------------------------------------------------------


def run_tasks(run, settings, machine):
    """What a run scores on tasks, without examples in the prompt, a dict for JSON.

    It has the scores of each of its `tasks` and, as their `average`, the accuracy. Standard errors are
    over the items that this run answers, not over seeds.
    """
    names = settings.tasks.split(',')
    model, tokenizer, checkpoint = load_run(run, settings.tokenizer)
    lm = make_lm(model.to(machine.device), tokenizer, settings, machine)
    output = harness(names, settings.data_dir)(lm)
    scores = {name: task_scores(output, name, lm, model.config.block_size) for name in names}
    return {
        'tasks': scores,
        'average': mean_of(scores, 'acc'),
        # A name, not a path, which tells of somebody's machine. None: from the hub.
        'data': Path(settings.data_dir).resolve().name if settings.data_dir else None,
        **about(model, checkpoint),
    }


def task_scores(output, name, lm, block_size):
    """What the harness says of one task, what guessing would score there, and of how many choices the
    model saw the end only."""
    samples = output['samples'][name]
    chances = [1 / len(sample['arguments']) for sample in samples]
    scores = {'items': len(samples), 'chance': float(np.mean(chances))}
    for metric in ('acc', 'acc_stderr', 'acc_norm', 'acc_norm_stderr'):
        value = output['results'][name].get(f'{metric},none')
        if value is not None:
            scores[metric] = value

    choices = [''.join(texts) for sample in samples for texts in sample['arguments']]
    lengths = [len(lm.tok_encode(choice)) for choice in choices]
    scores['choices'] = len(lengths)
    scores['cut_choices'] = sum(length > block_size + 1 for length in lengths)
    return scores


def make_lm(model, tokenizer, settings, machine):
    """The model as the harness's LM.

    Of a text of more than block_size + 1 tokens, the model sees only the end, as in the harness's own
    wrapper. That wrapper refuses an answer of more than block_size tokens; here, its last block_size
    tokens are scored, so that byte models can be evaluated.
    """
    from lm_eval.api.model import TemplateLM

    block_size, size = model.config.block_size, settings.batch_size

    class LM(TemplateLM):
        eot_token_id = tokenizer.eot
        # Tasks that let a model choose among given answers ask for neither.
        loglikelihood_rolling = generate_until = None

        def tok_encode(self, string, add_special_tokens=None, **options):
            return tokenizer.encode(string).tolist()

        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **options):
            texts, targets = [], []
            for _, context, answer in requests:
                text = torch.tensor((context + answer)[-block_size - 1 :])
                texts.append(text[:-1])
                target = text[1:].clone()
                target[: max(0, len(target) - len(answer))] = -1
                targets.append(target)

            order = sorted(
                range(len(texts)), key=lambda i: -len(texts[i])
            )  # the largest batch first
            answers = {}
            for first in tqdm(range(0, len(order), size), disable=disable_tqdm or None):
                batch = order[first : first + size]
                idx = pad_sequence([texts[i] for i in batch], True)
                labels = pad_sequence([targets[i] for i in batch], True, padding_value=-1)
                counts = (labels != -1).sum(dim=1).tolist()
                scores = score(model, idx, labels, machine, tokenizer.n_vocab)
                parts = [each.split(counts) for each in scores]
                for i, values, hits in zip(batch, *parts, strict=True):
                    answers[i] = values.sum().item(), hits.all().item()
            return [answers[i] for i in range(len(texts))]

    return LM()


# --- tables --------------------------------------------------------------------------------------


def print_losses(numbers):
    """A row per domain, and per run the loss and bits per byte, and per class the loss and its targets."""
    columns = []
    for run, report in numbers['runs'].items():
        title = f'{run}, {progress(report)}'
        for name, part in {title: report, **report.get('classes', {})}.items():
            entries = {**part['domains'], 'mean': part['mean']}
            columns.append((name, table_cells(entries, 'loss', 4, 'standard_error')))
            if part is report:
                columns.append(('bits/byte', table_cells(entries, 'bits_per_byte', 4)))
            else:
                columns.append(('targets', table_cells(entries, 'tokens', 0)))
    print_table(columns, numbers['standard_errors'])
    if len({(report['data'], report['block_size']) for report in numbers['runs'].values()}) > 1:
        print('These runs did not read the same text in windows of the same length.')


def print_tasks(numbers):
    """A row per task, two columns per run, and what guessing would score."""
    columns = []
    for run, report in numbers['runs'].items():
        tasks = report['tasks']
        average = {'acc': report['average'], 'chance': mean_of(tasks, 'chance')}
        entries = {**tasks, 'average': average}
        for metric in ('acc', 'acc_norm'):  # winogrande has no acc_norm
            cells = table_cells(entries, metric, 3, f'{metric}_stderr')
            columns.append((f'{run}, {metric}', cells))
    columns.append(('chance', table_cells(entries, 'chance', 3)))
    print_table(columns, numbers['standard_errors'])

    for run, report in numbers['runs'].items():
        print(f'{run}: {progress(report)}.')
        cuts = {name: scores['cut_choices'] for name, scores in report['tasks'].items()}
        if any(cuts.values()):
            print(
                f'{run} saw the last {report["block_size"]:,} tokens only of some choices: {cuts}.'
            )


def short_names(runs):
    """The names of runs' folders, and of their checkpoint files; of two that are the same, all paths."""
    paths = [Path(run).resolve() for run in runs]
    names = ['/'.join(path.parts[-2 if path.suffix == '.pt' else -1 :]) for path in paths]
    return [*map(printable, names if len({*names}) == len(names) else runs)]


def progress(report):
    """How far the training of a report's model is."""
    if report['max_iters'] is None:
        return 'imported'
    return f'step {report["step"]:,} of {report["max_iters"]:,}'


def table_cells(entries, name, digits, error_name=''):
    """{row: '1.8145 ± 0.0033', without an error '1.8145'} of the entries that have a number `name`."""
    cells = {}
    for row, entry in entries.items():
        if name in entry:
            cells[row] = f'{entry[name]:.{digits}f}'
            error = entry.get(error_name)
            if error is not None:
                cells[row] += f' ± {error:.{digits}f}'
    return cells


def print_table(columns, errors):
    """A Markdown table. columns: [(title, {row: text})]"""
    names = dict.fromkeys(name for _, cells in columns for name in cells)
    rows = [[name, *(cells.get(name, '') for _, cells in columns)] for name in names]
    print('\n' + markdown_table(['', *(title for title, _ in columns)], rows))
    print(f'\n±: standard errors {errors}.')


# --- the program ---------------------------------------------------------------------------------

# {mode: (what scores a run, what prints the scores, what their standard errors are over)}
PARTS = {
    'loss': (run_losses, print_losses, 'over windows of one run, not over seeds'),
    'tasks': (run_tasks, print_tasks, 'over items of one run, not over seeds'),
}


def main():
    with one_line_errors():
        modes = {'loss': (LossConfig,), 'tasks': (TasksConfig,)}
        mode, (settings,) = choose(modes, __doc__, plain='runs')
        for run in settings.runs:
            candidates(run)  # all of them, before the first is evaluated
        machine = Machine(settings.device, settings.dtype, attention='flash')
        refuse(
            mode == 'tasks' and machine.world_size > 1,
            'evaluate.py tasks is one process: start it without torchrun',
        )
        machine.join()

    with one_line_errors(everywhere=True), advise_on_memory('Lower --batch_size.'):
        score_run, show, errors = PARTS[mode]
        reports = {}
        numbers = {**provenance(machine), 'standard_errors': errors, 'runs': reports}
        for run in map(str, settings.runs):
            reports[run] = score_run(run, settings, machine)
            save_numbers(numbers, settings, machine)  # a later run may fail
        if machine.is_first:
            short = dict(zip(short_names(reports), reports.values(), strict=True))
            show({**numbers, 'runs': short})
    machine.close()


if __name__ == '__main__':
    main()
