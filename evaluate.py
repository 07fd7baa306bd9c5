"""
The quality of runs: loss per domain (the paper's Table 5) and six zero-shot tasks (Table 1).

$ python evaluate.py loss --out_dir=out/vanilla_82m out/resformer_82m out/svformer_82m --out=results/table5.json
$ torchrun --nproc_per_node=8 evaluate.py loss --out_dir=out/resformer_82m                    # the same figures
$ python evaluate.py tasks --out_dir=out/resformer_82m --tasks=hellaswag,piqa --data_dir=FOLDER

The tasks are lm-evaluation-harness's own: its prompts, its scoring. Their data come from the hub, or from --data_dir,
one folder per task with the files as first published (see FILES).
"""
import json
import math
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from configurator import configure, one_line_errors
from data import Dataset
from model import GPTConfig
from sample import load_run
from train import Machine, TrainConfig, provenance

TASKS = ('hellaswag', 'openbookqa', 'winogrande', 'arc_challenge', 'arc_easy', 'piqa')  # Table 1's columns
SIZES = {'82M': {}, '180M': dict(n_layer=12, n_head=12, n_embd=768), '468M': dict(n_layer=24, n_head=16, n_embd=1024)}
TABLE_5 = {('Transformer', '82M'): 2.7389, ('Transformer', '180M'): 2.5015, ('Transformer', '468M'): 2.2806,
           ('ResFormer', '82M'): 2.7117, ('ResFormer', '180M'): 2.4692, ('ResFormer', '468M'): 2.2537}
TABLE_1 = {('Transformer', '82M', 2048): ((0.263, 0.142, 0.492, 0.199, 0.331, 0.572), 0.333),
           ('ResFormer', '82M', 2048): ((0.273, 0.148, 0.512, 0.182, 0.414, 0.604), 0.355),
           ('Transformer', '82M', 64000): ((None,) * 6, 0.328), ('ResFormer', '82M', 64000): ((None,) * 6, 0.350)}
# A task's files in --data_dir, and how many items they hold when they are whole
FILES = {'hellaswag': (('hellaswag_val_preprocessed.jsonl',), 10042), 'openbookqa': (('test.jsonl',), 500),
         'winogrande': (('dev.jsonl',), 1267), 'arc_challenge': (('ARC-Challenge-Test.jsonl',), 1172),
         'arc_easy': (('ARC-Easy-Test.jsonl',), 2376), 'piqa': (('dev.jsonl', 'dev-labels.lst'), 1838)}
ROWS = 4096  # whose logits are in memory at once


@dataclass
class EvaluateConfig:
    out_dir: str = 'out/run'  # the first run; others follow as plain arguments
    batch_size: int = 32  # windows or texts at once
    device: str = 'auto'  # as in train.py
    dtype: str = 'auto'  # as in train.py
    out: str = ''  # write the numbers here, as JSON

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f'batch_size={self.batch_size} must be at least 1')
        if self.out and not Path(self.out).parent.is_dir():
            raise FileNotFoundError(f'there is no folder {Path(self.out).parent} to write --out to')

    def machine(self):
        return Machine(TrainConfig(device=self.device, dtype=self.dtype, compile=False,
                                   gradient_accumulation_steps=int(os.environ.get('WORLD_SIZE', 1))))


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


def paper_size(config):
    """('Transformer' or 'ResFormer', size) where the paper has this model, else None."""
    def normal(c):
        return replace(c, n_kv_head=c.kv_heads, n_inner=c.ffn_width, block_size=1, vocab_size=1, dropout=0.0)
    for size, shape in SIZES.items():
        for name, wiring in (('Transformer', {}), ('ResFormer', dict(v_residual=True))):
            if normal(config) == normal(GPTConfig(**shape, **wiring)):
                return name, size


@torch.no_grad()
def hidden_states(model, idx):
    """What lm_head reads, (B, T, C): the logits themselves would take V / C times its memory."""
    kept = []
    hook = model.lm_head.register_forward_pre_hook(lambda module, args: (kept.append(args[0]) or args[0][:, :0],))
    try:
        model(idx)
    finally:
        hook.remove()
    return kept[0]


def log_probabilities(model, hidden, targets, n_vocab=None):
    """(log-probability of each target, whether it is the likeliest) of rows hidden (N, C), targets (N,), in fp32 over
    the first n_vocab ids."""
    values, likeliest = [], []
    for h, t in zip(hidden.split(ROWS), targets.split(ROWS), strict=True):
        logits = model.lm_head(h)[:, :n_vocab].float()
        values.append(-F.cross_entropy(logits, t, reduction='none'))
        likeliest.append(logits.argmax(dim=1) == t)
    return torch.cat(values), torch.cat(likeliest)


# --- loss per domain -------------------------------------------------------------------------------------------------

@torch.no_grad()
def domain_losses(model, dataset, settings, machine, label=''):
    """{domain: (windows, 2) float64}: the summed loss and the number of predictions of each window of block_size
    predictions, over the whole validation split."""
    T, splits = model.config.block_size, dataset.meta['splits']['validation']
    windows = {domain: -(-(entry['tokens'] - 1) // T) for domain, entry in splits.items()}
    losses = {}
    with tqdm(total=sum(windows.values()), disable=not machine.is_first, unit='window', desc=label) as bar:
        for domain, count in windows.items():
            sums = torch.zeros((count, 2), dtype=torch.float64)
            for first in range(machine.rank * settings.batch_size, count, machine.world_size * settings.batch_size):
                rows = range(first, min(first + settings.batch_size, count))
                x = torch.zeros((len(rows), T), dtype=torch.int64)
                y = torch.full((len(rows), T), -1)
                for i, row in enumerate(rows):
                    tokens = torch.from_numpy(dataset.read('validation', domain, row * T, T + 1))
                    x[i, :len(tokens) - 1], y[i, :len(tokens) - 1] = tokens[:-1], tokens[1:]
                x, y = x.to(machine.device), y.to(machine.device)
                with machine.autocast():
                    hidden = hidden_states(model, x)
                    values, _ = log_probabilities(model, hidden.flatten(0, 1), y.flatten().clamp(min=0))
                counted = (y != -1).cpu().double()
                sums[first:rows.stop, 0] = -(values.view_as(y).cpu() * counted).sum(dim=1)
                sums[first:rows.stop, 1] = counted.sum(dim=1)
                bar.update(min(machine.world_size * settings.batch_size, count - first))  # those of all processes
            losses[domain] = machine.sum(sums.to(machine.device) if machine.distributed else sums).cpu().numpy()
    return losses


def standard_error(sums, counts):
    """Of the ratio sums.sum() / counts.sum(), over windows, in which longer ones weigh more; None for a single one."""
    rest = sums - counts * (sums.sum() / counts.sum())
    return float(rest.std(ddof=1) * math.sqrt(len(rest)) / counts.sum()) if len(rest) > 1 else None


def error_of_mean(domains):
    errors = [d['standard_error'] for d in domains.values()]
    return math.sqrt(sum(e * e for e in errors)) / len(errors) if None not in errors else None


def compare_losses(runs, settings, machine):
    """Table 5's numbers of several runs, as a dict for JSON."""
    reports, windows = {}, {}
    for run in runs:
        model, tokenizer, checkpoint = load_run(run)
        if checkpoint is None and not settings.dataset:
            raise ValueError(f'{run} is not a run of train.py: say which --dataset')
        dataset = Dataset(settings.dataset or checkpoint['settings']['dataset'])
        if dataset.meta['tokenizer']['sha256'] != tokenizer.sha256:
            raise ValueError(f'{run} was trained with another tokenizer than that of {dataset.folder}')
        if machine.is_first:
            dataset.verify()
        losses = domain_losses(model.to(machine.device), dataset, settings, machine, str(run))
        splits, domains = dataset.meta['splits']['validation'], {}
        for domain, sums in losses.items():
            total, tokens = sums.sum(axis=0)
            domains[domain] = {
                'loss': total / tokens, 'standard_error': standard_error(*sums.T),
                'bits_per_byte': total / math.log(2) / splits[domain]['bytes'], 'tokens': int(tokens)}
        means = {key: float(np.mean([d[key] for d in domains.values()])) for key in ('loss', 'bits_per_byte')}
        reports[str(run)] = {'domains': domains, 'mean': {**means, 'standard_error': error_of_mean(domains)},
                             'dataset': str(dataset.folder), 'step': checkpoint and checkpoint['step'],
                             'block_size': model.config.block_size, 'paper': paper_size(model.config)}
        windows[str(run)] = losses
        first = next(iter(reports))
        same = all(reports[first][key] == reports[str(run)][key] for key in ('dataset', 'block_size'))
        if str(run) != first and same:
            differences = {}  # window by window: most of the spread is common to all runs
            for domain, sums in losses.items():
                differences[domain] = {
                    'loss': domains[domain]['loss'] - reports[first]['domains'][domain]['loss'],
                    'standard_error': standard_error(sums[:, 0] - windows[first][domain][:, 0], sums[:, 1])}
            reports[str(run)]['minus_first'] = {**differences, 'mean': {
                'loss': means['loss'] - reports[first]['mean']['loss'], 'standard_error': error_of_mean(differences)}}
    return {**provenance(machine), 'runs': reports}


def print_losses(numbers):
    reports = numbers['runs']
    print('\n| domain | ' + ' | '.join(
        run + ('' if r['step'] is None else f', step {r["step"]:,}') + ' | bits/byte'
        + (' | minus first' if 'minus_first' in r else '') for run, r in reports.items()) + ' |')
    print('|---|' + ''.join('---:|' * (3 if 'minus_first' in r else 2) for r in reports.values()))
    domains = list(dict.fromkeys(domain for r in reports.values() for domain in r['domains']))
    for domain in [*domains, 'mean']:
        cells = []
        for r in reports.values():
            d = r['mean'] if domain == 'mean' else r['domains'].get(domain, {})
            cells += [pm(d.get('loss'), d.get('standard_error')), pm(d.get('bits_per_byte'), None)]
            if 'minus_first' in r:
                cells.append(pm(r['minus_first'][domain]['loss'], r['minus_first'][domain]['standard_error'], '+'))
        print(f'| {domain} | ' + ' | '.join(cells) + ' |')
    for run, r in reports.items():
        if r['paper'] in TABLE_5:
            print(f'{run}: the paper has {TABLE_5[r["paper"]]} for {" ".join(r["paper"])} (Table 5), after 20B tokens')


def pm(value, error, sign='', digits=4):
    return 'n/a' if value is None else f'{value:{sign}.{digits}f}' + ('' if error is None else f' ± {error:.{digits}f}')


# --- zero-shot tasks -------------------------------------------------------------------------------------------------

def read_items(task, data_dir):
    """A task's items from its published files, as rows of the dataset that the harness's definition of it reads."""
    names, whole = FILES[task]
    columns = []
    for name in names:
        path = Path(data_dir, task, name)
        if not path.is_file():
            raise FileNotFoundError(f'there is no {path}: --data_dir needs {", ".join(f"{task}/{n}" for n in names)}')
        columns.append([line for line in path.read_text(errors='replace').split('\n') if line.strip()])
        if len(columns[-1]) != whole:
            raise ValueError(f'{path} has {len(columns[-1])} lines, the set {whole}: half a download?')
    rows = []
    for item, (line, *labels) in enumerate(zip(*columns, strict=True), 1):
        try:
            rows.append(to_row(task, json.loads(line), *labels))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f'{" or ".join(str(Path(data_dir, task, name)) for name in names)}, item {item}: '
                             f'half a download, or laid out otherwise ({type(error).__name__}: {error})') from None
    return rows


def to_row(task, r, label=None):
    """An item, and its label where that has a file of its own, as a row. ValueError without a right answer."""
    if task == 'hellaswag':  # preprocessed as the harness does, but for the case of the context's second half
        row = {'ctx_a': r['ctx'], 'ctx_b': '', 'activity_label': r['activity_label'], 'endings': r['endings'],
               'label': str(r['label'])}
        answer, allowed = row['label'], [str(n) for n in range(len(r['endings']))]
    elif task == 'piqa':
        row = {**{key: r[key] for key in ('goal', 'sol1', 'sol2')}, 'label': int(label)}
        answer, allowed = row['label'], [0, 1]
    elif task == 'winogrande':
        row = {key: r[key] for key in ('sentence', 'option1', 'option2', 'answer')}
        answer, allowed = row['answer'], ['1', '2']
    else:
        question, choices = 'question_stem' if task == 'openbookqa' else 'question', r['question']['choices']
        row = {question: r['question']['stem'], 'answerKey': r['answerKey'],
               'choices': {key: [choice[key] for choice in choices] for key in ('text', 'label')}}
        answer, allowed = row['answerKey'], row['choices']['label']
    if answer not in allowed:
        raise ValueError(f'the answer {answer!r} is not one of {allowed}')
    return row


def harness_tasks(names, data_dir, folder, manager=None):
    """The harness's tasks; with a data_dir its definitions, on the rows of local files, which go through `folder`."""
    import datasets
    from lm_eval.tasks import TaskManager
    datasets.disable_progress_bars()
    manager = manager or TaskManager()
    if unknown := [name for name in names if name not in manager.task_index]:
        raise ValueError(f'lm-evaluation-harness has no task {", ".join(unknown)}')
    specs = names
    if data_dir:
        specs = [str(Path(folder, f'{name}.yaml')) for name in names]
        for name, spec in zip(names, specs, strict=True):
            rows = Path(folder, f'{name}.jsonl')
            rows.write_text(''.join(json.dumps(row) + '\n' for row in read_items(name, data_dir)))
            Path(spec).write_text(json.dumps({  # JSON is YAML
                'include': str(manager.task_index[name].yaml_path), 'dataset_path': 'json', 'dataset_name': None,
                'dataset_kwargs': {'data_files': dict.fromkeys(('train', 'validation', 'test'), str(rows)),
                                   'cache_dir': str(folder)}}))
    tasks = manager.load(specs)['tasks']
    if set(tasks) != set(names):
        raise ValueError(f'tasks={",".join(names)} names a group; name its tasks: {", ".join(tasks)[:200]}')
    return list(tasks.values())


def make_lm(model, tokenizer, settings, machine):
    """The model as the harness's LM. Contexts longer than block_size lose their left, as in its own wrapper."""
    from lm_eval.api.model import TemplateLM

    class LM(TemplateLM):
        eot_token_id = tokenizer.eot

        def tok_encode(self, string, add_special_tokens=None, **_):
            return tokenizer.encode(string).tolist()

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests, disable_tqdm=False, **_):
            T = model.config.block_size
            texts = [(context + continuation)[-(T + 1):] for _, context, continuation in requests]
            scored = [min(len(request[2]), len(text) - 1) for request, text in zip(requests, texts, strict=True)]
            order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # the largest batch first
            answers = [None] * len(texts)
            for first in tqdm(range(0, len(order), settings.batch_size), disable=disable_tqdm, unit='batch'):
                batch = order[first:first + settings.batch_size]
                idx = torch.zeros((len(batch), max(1, len(texts[batch[0]]) - 1)), dtype=torch.int64)
                for i, n in enumerate(batch):
                    idx[i, :len(texts[n]) - 1] = torch.tensor(texts[n][:-1])
                ends, counts = [len(texts[n]) - 1 for n in batch], [scored[n] for n in batch]
                targets = [token for n in batch for token in texts[n][len(texts[n]) - scored[n]:]]
                targets = torch.tensor(targets, dtype=torch.int64, device=machine.device)
                with machine.autocast():
                    hidden = hidden_states(model, idx.to(machine.device))
                    hidden = torch.cat([hidden[i, end - count:end] for i, (end, count) in enumerate(zip(
                        ends, counts, strict=True))])
                    values, hits = log_probabilities(model, hidden, targets, tokenizer.n_vocab)
                values, hits = values.double().cpu().split(counts), hits.cpu().split(counts)
                for n, value, hit in zip(batch, values, hits, strict=True):
                    answers[n] = value.sum().item(), bool(hit.all())
            return answers

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            raise NotImplementedError('perplexity of texts: evaluate.py loss')

        def generate_until(self, requests, disable_tqdm=False):
            raise NotImplementedError('tasks that generate text are not part of Table 1')

    return LM()


def evaluate_tasks(runs, settings, machine):
    """Table 1's numbers of several runs, as a dict for JSON; with the harness's samples apart: (numbers, samples)."""
    try:
        from lm_eval import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise OSError('evaluate.py tasks needs lm-evaluation-harness: pip install lm_eval') from None
    names = settings.tasks.split(',')
    if settings.data_dir and (unknown := [name for name in names if name not in FILES]):
        raise ValueError(f'no local form of {", ".join(unknown)} is known; there are {", ".join(FILES)}')
    reports, samples, manager = {}, {}, TaskManager()
    for run in runs:
        model, tokenizer, checkpoint = load_run(run)
        with tempfile.TemporaryDirectory() as folder:
            try:
                tasks = harness_tasks(names, settings.data_dir, folder, manager)
            except ConnectionError as error:
                raise OSError(f'cannot get {settings.tasks} from the hub ({" ".join(str(error).split())[:200]}); give '
                              'local files: --data_dir') from error
            found = simple_evaluate(make_lm(model.to(machine.device), tokenizer, settings, machine), tasks=tasks,
                                    limit=settings.limit or None, task_manager=manager)
        scores = {}
        for name in names:
            result, choices = found['results'][name], [len(s['arguments']) for s in found['samples'][name]]
            scores[name] = {'items': len(choices), 'chance': float(np.mean([1 / n for n in choices])),
                            **{key: value for key in ('acc', 'acc_stderr', 'acc_norm', 'acc_norm_stderr')
                               if isinstance(value := result.get(f'{key},none'), float)}}  # one item's error is 'N/A'
        reports[str(run)] = {'tasks': scores, 'average': float(np.mean([score['acc'] for score in scores.values()])),
                             'step': checkpoint and checkpoint['step'], 'block_size': model.config.block_size,
                             'paper': paper_size(model.config)}
        samples[str(run)] = found['samples']
    data = Path(settings.data_dir).name if settings.data_dir else 'hub'
    return {**provenance(machine), 'limit': settings.limit, 'data': data, 'runs': reports}, samples


def print_tasks(numbers):
    reports = numbers['runs']
    first = next(iter(reports.values()))['tasks']

    def line(name, cells, average):
        print(f'| {name} | ' + ' | '.join(cells) + f' | {average} |')

    print('\n| | ' + ' | '.join(first) + ' | average |\n|---|' + '---:|' * (len(first) + 1))
    for run, r in reports.items():
        scores = r['tasks'].values()
        for key, average in (('acc', f'{r["average"]:.3f}'), ('acc_norm', '')):
            line(f'{run}, {key}', [pm(s[key], s.get(f'{key}_stderr'), digits=3) if key in s else '' for s in scores],
                 average)
        values, average = TABLE_1.get((*(r['paper'] or ()), r['block_size']), ((), None))
        if average:
            paper = dict(zip(TASKS, values, strict=True))
            line('the paper, ' + ' '.join(r['paper']),
                 [f'{paper[name]:.3f}' if paper.get(name) else '' for name in first],
                 average if set(first) == set(TASKS) else '')
    line('chance', [f'{s["chance"]:.3f}' for s in first.values()],
         f'{np.mean([s["chance"] for s in first.values()]):.3f}')
    if 'hellaswag' in first and numbers['data'] != 'hub':
        print('\nHellaSwag from a preprocessed file: comparable with other programs on the same file only.')


def main():
    with one_line_errors(ValueError, OSError):
        mode = sys.argv[1] if len(sys.argv) > 1 else ''
        if mode not in ('loss', 'tasks'):
            print(__doc__.strip())
            sys.exit(0 if mode in ('--help', '-h') else 2)
        if mode == 'tasks' and int(os.environ.get('WORLD_SIZE', 1)) > 1:
            raise ValueError('evaluate.py tasks is one process, on one device: start it without torchrun')
        options = [argument for argument in sys.argv[2:] if argument.startswith('-')]
        (settings,) = configure(LossConfig if mode == 'loss' else TasksConfig, argv=options)
        runs = [settings.out_dir, *(argument for argument in sys.argv[2:] if not argument.startswith('-'))]
        machine = settings.machine()
    with one_line_errors(ValueError, OSError, everywhere=True):
        if mode == 'loss':
            numbers = compare_losses(runs, settings, machine)
        else:
            numbers, _ = evaluate_tasks(runs, settings, machine)
        if machine.is_first:
            if settings.out:
                Path(settings.out).write_text(json.dumps(numbers, indent=1) + '\n')
            (print_losses if mode == 'loss' else print_tasks)(numbers)
    if machine.distributed:
        torch.distributed.destroy_process_group()


if __name__ == '__main__':
    main()
