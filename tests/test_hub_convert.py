"""hub/convert.py: what goes out is a plain model of transformers, or a variant with its code."""

from unittest.mock import Mock

import checkpoints
import programs
import pytest
import reference
import torch
from checkpoints import assert_equal_logits, assert_same_model, load_remote, transformers
from conftest import ROOT, assert_one_line, contents, raises_one_line
from programs import BYTES, NEOX, SIZE, import_file, needs_neox, ours, program, tokens
from runs import succeed
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer
from variants import GPT2, SV

from hub import convert
from hub.convert import export
from lib import tokenizer
from lib.files import locked
from lib.trained import load_run

quiet = checkpoints.quiet
trained = programs.trained

PLAIN = {
    'GQA': dict(n_kv_head=2),
    'tied': dict(tie_embeddings=True, norm_eps=1e-6, rope_theta=500000.0),
    'llama3 scaling': dict(rope_scaling=(8.0, 1.0, 4.0, 16), n_kv_head=1),
    'Table 4 width': dict(n_inner=0, dropout=0.1),
    'gpt2': dict(GPT2, norm_eps=1e-3),
    'gpt2 tied': dict(GPT2, tie_embeddings=True, n_inner=0, dropout=0.1),
}


def load_plain(folder):
    """An export as transformers loads it, without a complaint."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


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

    succeed(convert.main, 'import', tmp_path, f'--to={tmp_path}/back')
    back, _, _ = load_run(tmp_path / 'back')
    assert_same_model(back, model)
    assert vars(back.config) == {**vars(config), 'n_inner': config.ffn_width, 'dropout': 0.0}


def test_what_transformers_saves_of_a_variant_it_loads(tmp_path):
    model = ours(**SV, tie_embeddings=True)
    export(model, BYTES, tmp_path / 'ours')
    load_remote(tmp_path / 'ours').save_pretrained(tmp_path / 'theirs', max_shard_size='40KB')
    assert torch.equal(load_remote(tmp_path / 'theirs')(tokens()).logits, model(tokens())[0])


# --- no weight is lost ---------------------------------------------------------------------------

# What a fork would change in model.py: a field, a weight, and the line that uses it.
FORK = {
    '    # shape\n    block_size': '    my_gate: bool = False\n    # shape\n    block_size',
    '        self.mlp = MLP(config)\n': """        self.mlp = MLP(config)
        self.my_gate = nn.Parameter(torch.ones(config.n_embd)) if config.my_gate else 1.0
""",
    'x = x + self.mlp(self.ln_2(x))': 'x = x + self.my_gate * self.mlp(self.ln_2(x))',
}


@pytest.mark.parametrize('arch', ['llama', 'gpt2'])
def test_a_weight_that_a_fork_adds_goes_out_with_its_code_and_only_there(
    arch, tmp_path, monkeypatch
):
    source = (ROOT / 'model.py').read_text()
    for old, new in FORK.items():
        assert source.count(old) == 1, f'model.py has changed: give FORK another line than {old!r}'
        source = source.replace(old, new)
    (tmp_path / 'model.py').write_text(source)
    fork = import_file(tmp_path / 'model.py')
    models = {}
    with monkeypatch.context() as patch:
        patch.setattr(convert, 'GPT', fork.GPT)
        patch.setattr(convert, 'CODE', (tmp_path / 'model.py', *convert.CODE[1:]))
        for name in ('plain', 'gated'):
            config = fork.GPTConfig(arch=arch, my_gate=name == 'gated', **SIZE)
            models[name] = reference.perturb(fork.GPT(config)).eval()
            export(models[name], BYTES, tmp_path / name)

    gated = load_remote(tmp_path / 'gated')
    assert 'model.transformer.h.2.my_gate' in gated.state_dict()
    assert_equal_logits(models['gated'], gated, tolerance=1e-5)
    # Without the weight the fork's models are plain.
    assert_equal_logits(models['plain'], load_plain(tmp_path / 'plain'))


@pytest.mark.parametrize('changes', [{}, SV], ids=str)
def test_a_weight_that_has_no_place_in_the_export_is_refused(changes, tmp_path):
    model = ours(**changes)
    model.transformer.h[1].attn.my_gate = torch.nn.Parameter(torch.ones(4))
    with raises_one_line('transformer.h.1.attn.my_gate'):
        export(model, BYTES, tmp_path / 'to')
    assert not (tmp_path / 'to').exists()


# --- the tokenizer -------------------------------------------------------------------------------

TEXTS = [
    '  two  spaces \n\n\tand tabs\r\n',
    'e\u0301 n\u0303',
    '\x00\x07',
    '\ufffd',
    '',
    'naïve Å “quotes” … 日本語 한국어 😀👨\u200d👩\u200d👧',
    "don't we'll  'S",
    'def f(x):\n        return x  # 1234',
]


@pytest.mark.parametrize('which', ['bytes', pytest.param(NEOX, marks=needs_neox)], ids=str)
def test_the_exported_tokenizer_is_ours(which, tmp_path):
    known = tokenizer.load(which)
    export(ours(), known, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.eos_token_id == theirs.bos_token_id == known.eot and len(theirs) == known.n_vocab
    assert theirs.model_max_length == 24
    assert (
        theirs.init_kwargs['model_input_names'] == [*theirs('a')] == ['input_ids', 'attention_mask']
    )
    for text in TEXTS:
        ids = known.encode(text).tolist()
        assert theirs(text)['input_ids'] == ids, repr(text)
        assert theirs.decode(ids) == known.decode(ids), repr(text)
    assert (tmp_path / 'tokenizer.json').read_bytes() == known.as_file()
    assert tokenizer.load(tmp_path).name == known.name


# --- the program ---------------------------------------------------------------------------------


def exported(out_dir, to):
    """python -m hub.convert export: (exit status or message, stdout, stderr)."""
    return program(convert.main, 'export', out_dir, f'--to={to}')


def test_a_run_is_exported(trained, tmp_path):
    status, out, _ = exported(trained, tmp_path / 'a' / 'b')
    assert status == 0 and f'{tmp_path}/a/b' in out
    model, _, _ = load_run(trained)
    assert torch.equal(load_remote(tmp_path / 'a/b')(tokens()).logits, model(tokens())[0])


def test_nothing_is_replaced(trained, tmp_path, monkeypatch):
    (tmp_path / 'file').write_text('mine')
    (tmp_path / 'folder').mkdir()
    (tmp_path / 'folder/.notes').write_text('mine')
    before = contents(tmp_path)
    for name in ('file', 'folder'):
        assert_one_line(exported(trained, tmp_path / name)[0], f'--to={tmp_path / name}')
    assert_one_line(program(convert.main, 'export', trained)[0], '--to')
    # Another export writes there, or has written since this one began.
    (tmp_path / 'new').mkdir()
    with locked(tmp_path / 'new', 'writing to'):
        assert_one_line(exported(trained, tmp_path / 'new')[0], 'another process', '--to')
    folders = Mock(side_effect=[tmp_path / 'new', tmp_path / 'new', ValueError('since')])
    monkeypatch.setattr(convert, 'empty_folder', folders)
    assert_one_line(exported(trained, tmp_path / 'new')[0], 'since')
    assert contents(tmp_path) == before


def test_an_export_that_stops_half_way_is_no_model(trained, tmp_path, monkeypatch):
    errors = {
        'hub.convert.write_tokenizer': OSError,
        'shutil.copy': OSError,
        'safetensors.torch.save_file': SafetensorError,
    }
    for step, error in errors.items():
        with monkeypatch.context() as patch:
            patch.setattr(step, Mock(side_effect=error('No space left on device')))
            assert_one_line(exported(trained, tmp_path / step)[0], 'No space left')
        with pytest.raises(OSError):
            load_remote(tmp_path / step)
        assert not (tmp_path / step / 'model.safetensors').exists()


def test_a_mistake_is_one_line_and_without_a_command_the_usage_is_told(tmp_path):
    assert_one_line(exported(tmp_path / 'none', tmp_path / 'to')[0], 'none')
    assert not (tmp_path / 'to').exists()
    status, out, err = program(convert.main)
    assert (status, err) == (2, '') and 'python -m hub.convert import' in out
