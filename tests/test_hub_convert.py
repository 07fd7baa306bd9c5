"""hub/convert.py: what goes out is a plain model of transformers, or a variant with its code."""

import contextlib
import shutil

import checkpoints
import programs
import pytest
import torch
from checkpoints import FORMATS, assert_equal_logits, assert_same_weights, transformers, written
from conftest import ROOT, contents
from programs import BYTES, assert_one_line, ours, program, small_bpe, tokens
from runs import finish, start
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from variants import GPT2, RES, SV

import tokenizer
from hub import convert
from hub.convert import export, llama_settings, load
from hub.read import BOTH, LLAMA
from rundir import load_run

quiet = checkpoints.quiet
trained = programs.trained

NEOX = ROOT.parent / 'shared' / 'data' / 'tokenizer' / 'tokenizer.json'

PLAIN = {
    'GQA': dict(n_kv_head=2),
    'tied': dict(tie_embeddings=True, norm_eps=1e-6, rope_theta=500000.0),
    'llama3 scaling': dict(rope_scaling=(8.0, 1.0, 4.0, 16), n_kv_head=1),
    'Table 4 width': dict(n_inner=0, dropout=0.1),
    'gpt2': dict(GPT2, norm_eps=1e-3),
    'gpt2 tied': dict(GPT2, tie_embeddings=True, n_inner=0, dropout=0.1),
    'gpt2, all heads named': dict(GPT2, n_kv_head=4),
}


def load_plain(folder):
    """An export as transformers loads it, without a complaint."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def load_remote(folder):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.mark.parametrize('name', PLAIN)
def test_vanilla_goes_out_as_what_transformers_knows_and_comes_back(name, tmp_path):
    model = ours(**PLAIN[name])
    config = model.config
    export(model, BYTES, tmp_path)
    theirs = load_plain(tmp_path)
    kinds = {'llama': transformers.LlamaForCausalLM, 'gpt2': transformers.GPT2LMHeadModel}
    assert type(theirs) is kinds[config.arch]
    assert not list(tmp_path.glob('*.py'))
    assert_equal_logits(model, theirs)
    assert theirs.generation_config.eos_token_id == BYTES.eot
    if config.arch == 'gpt2':
        for place in ('embd', 'attn', 'resid'):
            assert getattr(theirs.config, f'{place}_pdrop') == config.dropout

    back = load(tmp_path)
    assert_same_weights(back, model)
    assert torch.equal(back(tokens())[0], model(tokens())[0])
    assert back.config.kv_heads == config.kv_heads
    expected = {**config.__dict__, 'n_inner': config.ffn_width, 'dropout': 0.0}
    expected['n_kv_head'] = back.config.n_kv_head
    assert back.config.__dict__ == expected


@pytest.mark.parametrize('name', ['GQA', 'tied', 'llama3 scaling', 'Table 4 width'])
def test_llama_settings_are_those_of_the_export(name, tmp_path):
    model = ours(**PLAIN[name])
    export(model, BYTES, tmp_path)
    expected = AutoConfig.from_pretrained(tmp_path)
    settings = transformers.LlamaConfig(**llama_settings(model.config))
    for key in (*LLAMA.values(), *BOTH.values(), 'rope_parameters', 'hidden_act'):
        if key != 'rope_theta':  # which is in rope_parameters
            assert getattr(settings, key) == getattr(expected, key), key


VARIANTS = {
    'ResFormer, learned': dict(
        RES, residual_learned=True, residual_layers=(2,), residual_lambda=(2.0, 1.0)
    ),
    'SVFormer, scaled': dict(SV, n_kv_head=2, rope_scaling=(8.0, 1.0, 4.0, 16), dropout=0.1),
    'DenseFormer, tied': dict(denseformer=True, tie_embeddings=True),
    'gpt2 ResFormer, tied': dict(GPT2, **RES, tie_embeddings=True),
    'gpt2 GQA': dict(GPT2, n_kv_head=2, n_inner=0),
}


@pytest.mark.parametrize('name', VARIANTS)
def test_a_variant_comes_back_as_it_went_out_and_its_code_is_not_run(name, tmp_path):
    model = ours(**VARIANTS[name])
    export(model, BYTES, tmp_path)
    for path in tmp_path.glob('*.py'):
        path.write_text('raise RuntimeError')
    back = load(tmp_path)
    assert back.config == model.config
    assert_same_weights(back, model)
    assert torch.equal(back(tokens())[0], model(tokens())[0])
    assert (back.lm_head.weight is back.transformer.wte.weight) == model.config.tie_embeddings


@pytest.mark.parametrize('shards', [1, 3])
def test_a_variant_comes_back_from_what_transformers_saves_of_it(shards, tmp_path):
    model = ours(**SV, tie_embeddings=True)
    export(model, BYTES, tmp_path / 'ours')
    size = '5GB' if shards == 1 else '40KB'
    load_remote(tmp_path / 'ours').save_pretrained(tmp_path / 'theirs', max_shard_size=size)
    assert len(list((tmp_path / 'theirs').glob('*.safetensors'))) >= shards
    assert_same_weights(load(tmp_path / 'theirs'), model)


# --- no weight is lost ---------------------------------------------------------------------------

# What a fork would change in model.py: a field, a weight, and the line that uses it.
FORK = {
    '    def __post_init__(self):\n': '    my_gate: bool = False\n\n    def __post_init__(self):\n',
    '        self.mlp = MLP(config)\n': """        self.mlp = MLP(config)
        self.my_gate = nn.Parameter(torch.ones(config.n_embd)) if config.my_gate else 1.0
""",
    'x = x + self.mlp(self.ln_2(x))': 'x = x + self.my_gate * self.mlp(self.ln_2(x))',
}

EXPORT_OF_FORK = """
import sys
fork, tests, to = sys.argv[1:]
sys.path[:0] = [fork, tests]
import torch
from reference import perturb
from hub.convert import export
from model import GPT, GPTConfig
from tokenizer import load
idx = torch.load(f'{to}/idx')
for arch in ('llama', 'gpt2'):
    for my_gate in (False, True):
        size = dict(block_size=24, vocab_size=260, n_layer=3, n_head=4, n_embd=32)
        model = perturb(GPT(GPTConfig(arch=arch, my_gate=my_gate, **size))).eval()
        export(model, load('bytes'), f'{to}/{arch}-{my_gate}')
        torch.save(model(idx)[0], f'{to}/{arch}-{my_gate}.logits')
"""


@pytest.fixture(scope='module')
def fork(tmp_path_factory):
    """A folder with exports and logits of a repository that has a field and weights more."""
    folder = tmp_path_factory.mktemp('fork')
    for path in ROOT.glob('*.py'):
        shutil.copy(path, folder)
    shutil.copytree(ROOT / 'hub', folder / 'hub')
    source = (folder / 'model.py').read_text()
    for old, new in FORK.items():
        assert source.count(old) == 1, f'model.py has changed: give FORK another line than {old!r}'
        source = source.replace(old, new)
    (folder / 'model.py').write_text(source)

    to = tmp_path_factory.mktemp('exports')
    torch.save(tokens(), to / 'idx')
    (folder / 'export.py').write_text(EXPORT_OF_FORK)
    status, _, err = finish(start(folder / 'export.py', folder, ROOT / 'tests', to))
    assert status == 0, err
    return to


@pytest.mark.parametrize('arch', ['llama', 'gpt2'])
def test_a_weight_that_a_fork_adds_goes_out_with_its_code(arch, fork):
    theirs = load_remote(fork / f'{arch}-True')
    assert 'model.transformer.h.2.my_gate' in theirs.state_dict()
    logits = theirs(tokens()).logits
    assert (logits - torch.load(fork / f'{arch}-True.logits')).abs().max() < 1e-5

    # Without the weight the fork's models are plain, and with it they compute something else.
    plain = load_plain(fork / f'{arch}-False')(tokens()).logits
    assert (plain - torch.load(fork / f'{arch}-False.logits')).abs().max() < 1e-4
    assert (plain - logits).abs().max() > 0.01


@pytest.mark.parametrize('arch', ['llama', 'gpt2'])
def test_a_model_with_a_field_that_only_a_fork_has_is_refused_by_the_field(arch, fork):
    with pytest.raises(ValueError, match='GPTConfig has no my_gate; .* another model.py') as caught:
        load(fork / f'{arch}-True')
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize('changes', [{}, GPT2, SV, dict(tie_embeddings=True)], ids=str)
def test_a_weight_that_has_no_place_in_the_export_is_refused(changes, tmp_path):
    model = ours(**changes)
    attn = model.transformer.h[1].attn
    attn.my_gate = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(ValueError, match='transformer.h.1.attn.my_gate') as caught:
        export(model, BYTES, tmp_path / 'to')
    assert '\n' not in str(caught.value)
    assert not (tmp_path / 'to').exists()

    del attn.my_gate
    export(model, BYTES, tmp_path / 'to')
    del model.transformer.h[1].ln_2
    with pytest.raises(ValueError, match='transformer.h.1.ln_2.weight'):
        export(model, BYTES, tmp_path / 'to')


# --- the tokenizer -------------------------------------------------------------------------------

TEXTS = [
    'Hello world',
    '  two  spaces \n\n\tand tabs\r\n',
    'e\u0301 n\u0303',
    'x' * 300,
    '\x00\x07',
    '\ufffd',
    ' ',
    '',
    'naïve Å “quotes” … 日本語 한국어 😀👨\u200d👩\u200d👧',
    "don't we'll  'S",
    'def f(x):\n        return x  # 1234',
]

needs_neox = pytest.mark.skipif(
    not NEOX.exists(),
    reason='no ../shared/data/tokenizer: the real GPT-NeoX vocabulary is not tested',
)


@pytest.mark.parametrize('model', [{}, GPT2, SV], ids=['llama', 'gpt2', 'SVFormer'])
@pytest.mark.parametrize('which', ['bytes', pytest.param('gpt-neox', marks=needs_neox)])
def test_the_exported_tokenizer_is_ours(which, model, tmp_path):
    known = tokenizer.load(NEOX if which == 'gpt-neox' else 'bytes')
    export(ours(**model), known, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, trust_remote_code=True)
    assert theirs.eos_token_id == theirs.bos_token_id == known.eot and len(theirs) == known.n_vocab
    assert theirs.model_max_length == 24
    for text in TEXTS:
        ids = known.encode(text).tolist()
        assert theirs(text)['input_ids'] == ids, repr(text)
        assert theirs.decode(ids) == known.decode(ids), repr(text)
    if which == 'gpt-neox':
        assert (tmp_path / 'tokenizer.json').read_bytes() == NEOX.read_bytes()


# --- the program ---------------------------------------------------------------------------------


def exported(out_dir, to):
    """python -m hub.convert export: (exit status or message, stdout, stderr)."""
    return program(convert.main, 'export', f'--out_dir={out_dir}', f'--to={to}')


def test_a_run_is_exported_and_exported_again_into_the_same_folder(trained, tmp_path):
    folder = tmp_path / 'a' / 'b'
    status, out, _ = exported(trained, folder)
    assert status == 0 and str(folder) in out
    first = contents(folder)
    assert exported(f'{trained}/ckpt_2.pt', folder)[0] == 0
    assert contents(folder) == first
    model, _, _ = load_run(trained)
    assert torch.equal(load_remote(folder)(tokens()).logits, model(tokens())[0])


def test_an_export_of_another_kind_replaces_one(tmp_path):
    for changes in (SV, {}, RES, GPT2):
        model = ours(**changes)
        export(model, BYTES, tmp_path)
        assert_equal_logits(model, load_remote(tmp_path))


def test_only_an_export_is_replaced_and_no_other_checkpoint(trained, tmp_path):
    to = tmp_path / 'to'
    assert exported(trained, to)[0] == 0
    first = contents(to)

    def assert_left_alone():
        before = contents(to)
        assert_one_line(exported(trained, to)[0], f'--to={to}', 'empty')
        assert contents(to) == before
        shutil.rmtree(to)

    load_remote(to).save_pretrained(to)  # trained further, say
    assert_left_alone()
    written(to)
    assert_left_alone()
    written(to)
    (to / 'generation_config.json').unlink()  # no name is left that an export does not write
    assert_left_alone()
    FORMATS['sharded safetensors'](to, written(to))
    assert_left_alone()
    to.mkdir()
    assert exported(trained, to)[0] == 0 and contents(to) == first


STEPS = ['hub.convert.write_tokenizer', 'shutil.copy', 'safetensors.torch.save_file']


@pytest.mark.parametrize('step', STEPS)
@pytest.mark.parametrize('earlier', [None, {}, GPT2], ids=['new', 'llama', 'gpt2'])
def test_an_export_that_stops_half_way_is_no_model_and_can_be_repeated(
    earlier, step, trained, tmp_path, monkeypatch
):
    whole, to = tmp_path / 'whole', tmp_path / 'to'
    assert exported(trained, whole)[0] == 0
    if earlier is not None:
        export(ours(**earlier), BYTES, to)

    def stop(*args, **options):
        if step.endswith('save_file'):
            (to / '.tmpAbCdEf').write_bytes(b'half')  # as a killed process leaves it
        raise SafetensorError('No space left on device')

    with monkeypatch.context() as patch:
        patch.setattr(step, stop)
        with contextlib.suppress(SafetensorError):
            assert_one_line(exported(trained, to)[0], to / 'model.safetensors', 'No space left')
    with pytest.raises(ValueError, match='neither model.safetensors nor'):
        load(to)

    assert exported(trained, to)[0] == 0
    assert contents(to) == contents(whole)


FOREIGN = {
    'hidden': ['.tmpAbCdEf'],
    'notes': ['notes.txt'],
    'run': ['ckpt.pt', 'config.json'],
    'old run': ['ckpt_6.pt', 'config.json'],
}


def test_a_folder_with_other_files_is_refused_and_left_alone(trained, tmp_path):
    for name, files in FOREIGN.items():
        folder = tmp_path / name
        folder.mkdir()
        for file in files:
            (folder / file).write_text('mine')
        assert_one_line(exported(trained, folder)[0], f'--to={folder}')
        assert contents(folder) == {file: b'mine' for file in files}
    (tmp_path / 'file').write_text('mine')
    assert_one_line(exported(trained, tmp_path / 'file')[0], '--to')
    for word, *flags in (('--to',), ('too', '--too=there')):
        status, _, _ = program(convert.main, 'export', f'--out_dir={trained}', *flags)
        assert_one_line(status, word)


@pytest.mark.parametrize('changes', [{}, SV], ids=['llama', 'SVFormer'])
def test_an_export_into_the_folder_that_it_reads_leaves_it_as_it_was(changes, tmp_path):
    folder = tmp_path / 'folder'
    export(ours(**changes), small_bpe(tmp_path / 'tokenizer'), folder)
    before = contents(folder)
    assert exported(folder, folder)[0] == 0
    assert contents(folder) == before


def typed(*words):
    """python -m hub.convert, as a person types it: (exit status, stdout, stderr)."""
    return finish(start('-m', 'hub.convert', *words, PYTHONPATH=str(ROOT)))


def test_a_mistake_of_the_export_is_one_line_and_exit_status_1(tmp_path):
    status, out, err = typed('export', f'--out_dir={tmp_path}/none', f'--to={tmp_path}/to')
    assert (status, out, err.count('\n')) == (1, '', 1)
    assert err.startswith('error: ') and 'none' in err
    assert not (tmp_path / 'to').exists()


def test_without_a_command_the_usage_is_told_and_exit_status_2():
    status, out, err = typed()
    assert (status, err) == (2, '') and 'python -m hub.convert export' in out
    assert program(convert.main, 'import') == (2, out, '')
    assert program(convert.main, '--help') == (0, out, '')
