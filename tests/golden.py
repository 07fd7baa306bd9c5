"""
Is this tree still what commit b36dcaa was? Runs both side by side on this machine, one thread each.

$ python tests/golden.py                    # everything
$ python tests/golden.py models samples     # some sections
$ python tests/golden.py --keep=FOLDER      # the old tree's results are kept there, and taken again

Floats are compared bit for bit, reports by their numbers. Retired when the house stands.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

OLD = 'b36dcaa'
ROOT = Path(__file__).parent.parent
ENVIRONMENT = {**os.environ, 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}

# Runs inside a tree: it prints {variant: digests}. The variants are those of the old tree.
MODELS = """
import hashlib, json, sys
sys.path[:0] = [sys.argv[1]]
import torch
from model import GPT, GPTConfig
def digest(tensors):
    h = hashlib.sha256()
    for t in tensors:
        h.update(t.detach().contiguous().numpy().tobytes())
    return h.hexdigest()[:16]
out = {}
for name, settings in json.load(open(sys.argv[2])).items():
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in settings.items()}
    model = GPT(GPTConfig(**settings), seed=3)
    named = sorted(model.named_parameters())
    out[f'{name}: initial weights'] = digest(p for _, p in named)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, p in named:
            p += torch.empty_like(p).normal_(0.0, 0.25, generator=g)
    idx = torch.randint(61, (2, 17), generator=g)
    loss = model(idx, idx.roll(-1, 1))[1]
    loss.backward()
    out[f'{name}: loss'] = loss.item()
    out[f'{name}: gradients'] = digest(p.grad for _, p in named)
    with torch.no_grad():
        model.eval()
        out[f'{name}: logits'] = digest([model(idx)[0]])
        cache = model.new_cache(2, 17)
        chunks = [model(t, cache=cache)[0] for t in idx.split([9, 1, 7], dim=1)]
        out[f'{name}: decoded'] = digest(chunks)
        out[f'{name}: cache bytes'] = cache.nbytes
    out[f'{name}: parameters'] = model.num_params(), model.num_params(non_embedding=False)
    out[f'{name}: flops'] = model.flops_per_token(17)
print(json.dumps(out))
"""

VARIANTS = """
import json, sys
sys.path[:0] = [sys.argv[1] + '/tests', sys.argv[1]]
from variants import SIZE, VARIANTS
print(json.dumps({name: {**SIZE, **settings} for name, settings in VARIANTS.items()}))
"""

SMALL_RUN = (
    '--n_layer=3 --n_head=2 --n_embd=32 --block_size=64 --batch_size=4 --log_interval=1 '
    '--eval_interval=10 --eval_iters=2 --warmup_iters=4 --lr_decay_iters=20 --dataset=golden_bytes'
).split()
RUNS = {
    'vanilla': [],
    'resformer': ['--v_residual=True', '--residual_learned=True'],
    'svformer': ['--share_v=True'],
}


def call(tree, *words, check=True):
    """What a program of a tree prints."""
    words = [sys.executable, *map(str, words)]
    done = subprocess.run(words, cwd=tree, env=ENVIRONMENT, capture_output=True, text=True)
    if check and done.returncode:
        raise SystemExit(f'{" ".join(words)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}')
    return done.stdout


def documents(folder):
    """Two files of rows in SlimPajama's form."""
    words = (ROOT / 'tests/golden.py').read_text().split()
    domains = ['RedPajamaC4', 'RedPajamaGithub', 'RedPajamaBook']
    for split, files in {'train': 3, 'validation': 1}.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        for number in range(files):
            rows = []
            for i in range(60):
                start = hash_of(f'{split}{number}{i}')
                text = ' '.join(
                    words[(start + 7 * k) % len(words)] for k in range(50 + start % 150)
                )
                meta = {'redpajama_set_name': domains[(i + number) % 3]}
                rows.append(json.dumps({'text': text, 'meta': meta}))
            (folder / split / f'{number}.jsonl').write_text('\n'.join(rows) + '\n')


def hash_of(text):
    return int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


# --- sections: each gives {fact: value} of a tree; work: a folder for what it writes --------------


def models(tree, work, old):
    path = work / 'variants.json'
    path.write_text(call(old, '-c', VARIANTS, old))
    return json.loads(call(tree, '-c', MODELS, tree, path))


def prepare(tree, work, old):
    """Token files of bytes, and of a BPE where the shared tokenizers are."""
    source = work.parent / 'documents'
    if not source.exists():
        documents(source)
    tokenizers = {'bytes': 'bytes'}
    shared = ROOT.parent / 'shared/data/tokenizer_4k'
    if shared.exists():
        tokenizers['4k'] = shared
    facts = {}
    for name, tokenizer in tokenizers.items():
        out = f'data/golden_{name}'
        flags = [f'--source={source}', f'--tokenizer={tokenizer}', f'--out={out}', '--tokens=0']
        call(tree, 'prepare_slimpajama.py', *flags, '--workers=2')
        for path in sorted(Path(tree, out).glob('*/*.bin')):
            facts[f'{name}: {path.parent.name}/{path.name}'] = digest(path)
        meta = json.loads(Path(tree, out, 'meta.json').read_text())
        facts[f'{name}: splits'] = meta['splits']
    return facts


def train(tree, work, old):
    """Logs of three models of config/demo.py, and of one that is continued."""
    need_data(tree, work, old)
    config = Path(old, 'config/demo.py')
    facts = {}
    for name, flags in RUNS.items():
        common = [config, *SMALL_RUN, *flags]
        out = f'--out_dir={work}/{name}'
        call(tree, 'train.py', *common, '--max_iters=20', out)
        facts[f'{name}: log'] = log_of(work / name)
        out = f'--out_dir={work}/{name}_continued'
        call(tree, 'train.py', *common, '--max_iters=10', out)
        call(tree, 'train.py', *common, '--max_iters=20', '--init_from=resume', out)
        continued = log_of(work / f'{name}_continued')
        facts[f'{name}: continued'] = [e for e in continued if e['step'] >= 10]
    return facts


def log_of(folder):
    """The lines that say a loss; of an evaluation, and of what is new in one, only what both have."""
    names = ('step', 'loss', 'lr', 'grad_norm', 'tokens', 'val')
    lines = [json.loads(line) for line in (folder / 'log.jsonl').read_text().splitlines()]
    lines = [{k: e[k] for k in names if k in e} for e in lines]
    return [e for e in lines if 'loss' in e or 'val' in e]


def need_data(tree, work, old):
    if not Path(tree, 'data/golden_bytes/meta.json').exists():
        prepare(tree, work, old)


def need_runs(tree, work, old):
    if not (work / 'svformer_continued/log.jsonl').exists():
        train(tree, work, old)


def samples(tree, work, old):
    need_runs(tree, work, old)
    facts = {}
    for name in RUNS:
        for how in ('--temperature=0', '--top_k=5', '--top_p=0.8'):
            words = ['--start=the loss', how, '--max_new_tokens=40', f'--out_dir={work}/{name}']
            facts[f'{name} {how}'] = call(tree, 'sample.py', *words)
    return facts


def losses(tree, work, old):
    """evaluate.py loss, by its numbers."""
    need_runs(tree, work, old)
    text = call(tree, 'evaluate.py', 'loss', *(work / name for name in RUNS))
    return {'numbers': re.findall(r'\d+\.\d{3,}', text)}


def exports(tree, work, old):
    need_runs(tree, work, old)
    facts = {}
    for name in RUNS:
        out = work / f'{name}_hf'
        if not out.exists():
            call(tree, '-m', 'hub.convert', 'export', f'--out_dir={work}/{name}', f'--to={out}')
        facts[name] = digest(out / 'model.safetensors')
    return facts


def verdicts(tree, work, old):
    """compare.py on kept runs: differences, intervals and p of each contrast."""
    kept = Path(old, 'results/claims/main')
    folders = [
        kept / f'{arm}_lr0.006_seed{seed}'
        for arm in ('vanilla', 'resformer', 'svformer')
        for seed in (3, 4, 5)
    ]
    call(tree, 'compare.py', *folders, '--name=golden')
    report = json.loads(Path(tree, 'out/compare/golden/report.json').read_text())
    contrasts = report['contrasts']
    if isinstance(contrasts, dict):
        contrasts = list(contrasts.values())
    return {
        f'contrast {i}': {k: v for k, v in contrast.items() if k in FIGURES}
        for i, contrast in enumerate(contrasts)
    }


FIGURES = ('differences', 'mean', 'p', 'p_holm', 'verdict')
SECTIONS = [models, prepare, train, samples, losses, exports, verdicts]


def same(a, b):
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def main():
    names = [word for word in sys.argv[1:] if not word.startswith('--keep=')]
    keep = [word.removeprefix('--keep=') for word in sys.argv[1:] if word.startswith('--keep=')]
    unknown = set(names) - {section.__name__ for section in SECTIONS}
    if unknown:
        raise SystemExit(f'no section is named {", ".join(unknown)}')
    scratch = Path(tempfile.mkdtemp(prefix='golden_'))
    kept = Path(keep[0]).absolute() if keep else scratch
    old = kept / 'old_tree'
    if not old.exists():
        old.mkdir(parents=True)
        archive = subprocess.run(['git', 'archive', OLD], cwd=ROOT, capture_output=True, check=True)
        subprocess.run(['tar', 'x', '-C', old], input=archive.stdout, check=True)

    differing = 0
    for section in SECTIONS:
        name = section.__name__
        if names and name not in names:
            continue
        path = kept / f'{name}.json'
        if not path.exists():
            work = kept / 'old'
            work.mkdir(exist_ok=True)
            path.write_text(json.dumps(section(old, work, old)))
        before = json.loads(path.read_text())
        work = scratch / 'new'
        work.mkdir(exist_ok=True)
        after = json.loads(json.dumps(section(ROOT, work, old)))
        wrong = [
            fact for fact in {**before, **after} if not same(before.get(fact), after.get(fact))
        ]
        print(f'{name}: {len(before)} facts, {len(wrong)} differ', flush=True)
        for fact in wrong:
            print(f'  {fact}\n    {str(before.get(fact))[:300]}\n    {str(after.get(fact))[:300]}')
        differing += len(wrong)
    sys.exit(1 if differing else 0)


if __name__ == '__main__':
    main()
