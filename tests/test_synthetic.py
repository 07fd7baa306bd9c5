"""paper/synthetic.py: its tasks against slow definitions, and what its command writes."""

import itertools

import numpy as np
import pytest
import torch
from conftest import read_json
from programs import program

from paper import synthetic


def samples(task, **settings):
    """[(tokens, targets, slots)] without what stands at the first token, and the first tokens."""
    settings = synthetic.SyntheticConfig(length=9, alphabet=3, **settings)
    generator = torch.Generator().manual_seed(3)
    idx, targets, slots = synthetic.draw_samples(task, settings, 40, generator)
    assert (targets[:, 0] == -1).all()
    rows = zip(*(x[:, 1:].tolist() for x in (idx, targets, slots)), strict=True)
    return list(rows), idx[:, 0].tolist()


@pytest.mark.parametrize('task', ['S_3', 'A_5', 'S_5'])
def test_a_product_is_that_of_permutations(task):
    elements = list(itertools.permutations(range(int(task[-1]))))
    if task[0] == 'A':
        elements = [p for p in elements if np.linalg.det(np.eye(5)[list(p)]) > 0]
    rows, _ = samples(task)
    for tokens, targets, slots in rows:
        product = range(int(task[-1]))
        for token, target in zip(tokens, targets, strict=True):
            product = tuple(product[i] for i in elements[token])
            assert product == elements[target]
        assert slots == [*range(1, 10)]


@pytest.mark.parametrize('n', [6, 60])
def test_a_cyclic_product_is_a_sum(n):
    for tokens, targets, _ in samples(f'Z_{n}')[0]:
        assert targets == [sum(tokens[: i + 1]) % n for i in range(9)]


def followed(tokens, i, k, offset):
    """What k hops from place i lead to, or -1."""
    for _ in range(k):
        earlier = [j for j in range(i) if tokens[j] == tokens[i]]
        if not earlier or max(earlier) + offset < 0:
            return -1
        i = max(earlier) + offset
    return tokens[i]


def test_hops_go_k_times_to_what_followed_the_last_occurrence():
    rows, first = samples('hops', hops=3)
    seen = set()
    for (tokens, targets, slots), begin in zip(rows, first, strict=True):
        k = synthetic.VOCABULARY - begin
        assert targets == [followed(tokens, i, k, 1) for i in range(9)]
        assert set(slots) == {k} and all(a != b for a, b in itertools.pairwise(tokens))
        seen |= {(k, target) for target in targets}
    assert seen == {*itertools.product((1, 2, 3), (-1, 0, 1, 2))}


@pytest.mark.parametrize('task, offset', [('recall', 1), ('before', -1)])
def test_recall_asks_for_each_token_once(task, offset):
    for tokens, targets, _ in samples(task, hops=3)[0]:  # one hop, nevertheless
        assert sorted(tokens[:9]) == sorted(tokens[9:]) == [*range(9)]
        assert targets == [followed(tokens, i, 1, offset) for i in range(18)]
        assert targets[:9] == [-1] * 9 and targets[9:].count(-1) == (task == 'before')


def test_accuracy_is_the_share_of_targets_that_were_found_in_a_slot():
    idx = torch.tensor([[0, 1, 2], [2, 1, 1]])

    def copy(idx):
        return torch.nn.functional.one_hot(idx).float(), None

    targets = torch.tensor([[-1, 1, 0], [-1, 1, 1]])
    empty, *others = synthetic.accuracy(copy, idx, targets, torch.arange(3).expand(2, 3))
    assert np.isnan(empty) and others == [1, 0.5]


def test_a_command_writes_runs_that_can_be_made_again(here):
    words = (
        'S_3 --length=2 --n_layer=2 --n_head=2 --n_embd=16 --steps=5 --interval=2 --batch_size=8'
    )
    arms = '--arms=vanilla; svformer: share_v=True n_head=1 dropout=0.1'

    def command(out, seeds):
        options = [f'--out={out}', f'--seeds={seeds}', '--rates=(0.01,)']
        assert program(synthetic.main, *words.split(), arms, *options)[0] == 0

    command('one', '(1,)')
    path = here / 'one/svformer_lr0.01_seed1.json'
    written = path.read_bytes()
    command('one', '(1, 2)')
    command('two', '(2, 1)')
    assert path.read_bytes() == written and (here / 'one/accuracy.png').exists()
    assert len(list((here / 'one').glob('*.json'))) == 4
    other = ['--out=one', '--rates=(0.01,)', '--n_inner=8', '--steps=6']
    status = program(synthetic.main, *words.split(), arms, *other)[0]
    assert 'one/vanilla_lr0.01_seed1.json is a run with another steps, model;' in status
    status = program(
        synthetic.main, *words.split(), '--arms=vanilla; long: length=3', '--out=three'
    )[0]
    assert 'arm long changes more than the model' in status
    status = program(synthetic.main, 'recall', '--length=128', '--block_size=512', '--out=four')[0]
    assert 'more than 128 different tokens' in status

    run, again = (read_json(here / out / path.name) for out in ('one', 'two'))
    assert (run['task'], run['seed'], run['rate'], run['steps']) == ('S_3', 1, 0.01, 5)
    assert run['cpu_seconds'] >= 0
    assert run['model']['share_v'] is True and run['model']['n_head'] == 1 and run['commit']
    assert run['accuracy'] == again['accuracy'] and [*run['accuracy']] == ['2', '4', '5']
    for name in ('svformer_lr0.01_seed2', 'vanilla_lr0.01_seed1'):
        assert read_json(here / f'one/{name}.json')['accuracy'] != run['accuracy']
    for empty, *others in run['accuracy'].values():
        assert empty is None and all(0 < share < 1 for share in others)
