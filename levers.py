"""
The rows of bench.py's tables by their names: a model, and the levers that are pulled for it.

A name is VARIANT[+field=value ...][:lever ...], as in vanilla, gqa+q_residual=True:eager or
vanilla:flash:chunk=8192. `hf` in place of a variant is transformers' Llama of the same shape.
bench.py's first lines say what each lever does.

>>> recipe = read_name('vanilla:chunk=8192', GPTConfig())   # refuses what it does not know
>>> model = recipe.make(seed=1337)
>>> with recipe.levers.pulled(): ...                        # a step of it
"""

import contextlib
import importlib.util
import re
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.nn.attention import SDPBackend, sdpa_kernel

import model as model_file
from configurator import configure
from model import GPT, GPTConfig, refuse
from train import TrainConfig

# {variant: its config file}
VARIANTS = {
    path.stem.removesuffix('_82m'): path
    for path in sorted(Path(__file__).parent.glob('config/*_82m.py'))
}

KERNELS = {
    'flash': SDPBackend.FLASH_ATTENTION,
    'cudnn': SDPBackend.CUDNN_ATTENTION,
    'efficient': SDPBackend.EFFICIENT_ATTENTION,
}
FLAGS = ('eager', 'checkpointed', 'half', 'ddp-first', 'ddp-whole', 'static', *KERNELS)

# Levers that change only training steps.
OF_TRAINING = 'checkpointed half chunk budget ddp-first ddp-whole static bucket'.split()

# Levers that change our own model or its loss.
OF_OUR_ROWS = ('checkpointed', 'half', 'chunk')

# Levers of the compiler, and of DistributedDataParallel: they do nothing without it.
OF_COMPILER = ('budget', 'mode', 'ddp-whole')
OF_DDP = ('ddp-first', 'ddp-whole', 'static', 'bucket')


# --- a row's name --------------------------------------------------------------------------------


def split_names(text):
    """The names of rows with commas between them; a comma in parentheses belongs to a value."""
    return re.split(r',(?![^(]*\))', text)


def read_name(name, shape):
    """The Recipe of a row. shape: the GPTConfig whose shape all rows have.

    Raises ValueError for a variant, a field or a lever that does not exist, or that a row cannot have.
    """
    kind, *words = name.split(':')
    kind, *flags = kind.split('+')
    levers = Levers(words)
    if kind == 'hf':
        refuse(
            not importlib.util.find_spec('transformers'),
            '--peers=hf needs transformers: pip install -r requirements-dev.txt',
        )
        refuse(flags, f"{name}: hf is transformers' Llama, which has no fields of ours")
        for lever in OF_OUR_ROWS:
            refuse(lever in levers.values, f'{lever} is a lever of our own rows, not of hf')
        return Recipe(kind, shape, levers)

    refuse(
        kind not in VARIANTS,
        f'no variant {kind!r}; there are {", ".join(VARIANTS)}',
    )
    same_in_all_rows = {*shape.shape(), *asdict(TrainConfig())}
    for flag in flags:
        field = flag.partition('=')[0]
        refuse(
            field in same_in_all_rows,
            f'{name}: {field} is the same in all rows; set it with --{field}',
        )
    options = [f'--{field}={value}' for field, value in shape.shape().items()]
    options += [f'--{flag}' for flag in flags]
    try:
        _, config = configure(TrainConfig, GPTConfig, argv=[str(VARIANTS[kind]), *options])
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from error
    return Recipe(kind, config, levers)


@dataclass
class Recipe:
    """What a row's name says."""

    kind: str  # a variant, or hf
    config: GPTConfig  # of hf: of the same shape, to count FLOPs with
    levers: 'Levers'

    def make(self, seed):
        """The model, on the CPU and in fp32."""
        if self.kind == 'hf':
            return HuggingFaceLlama(self.config)
        return GPT(self.config, seed)

    def flops_per_token(self):
        """Training FLOPs per token; those of hf are counted on our model of its shape."""
        with torch.device('meta'):
            return GPT(self.config).flops_per_token(self.config.block_size)


class HuggingFaceLlama(nn.Module):
    """transformers' Llama behind our call, with the loss as it computes it.

    Under torch.compile, transformers would attend with a mask of all pairs of tokens, which flash and
    cuDNN's kernels do not take (transformers issue 48925). For an attention of a name that it does
    not know, it makes no mask; then its own function calls the causal kernel, compiled or not.
    """

    def __init__(self, config):
        super().__init__()
        from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        from hub.convert import llama_settings

        settings = LlamaConfig(**llama_settings(config), use_cache=False)
        self.llama = LlamaForCausalLM(settings)
        AttentionInterface.register('causal', sdpa_attention_forward)
        self.llama.set_attn_implementation('causal')

    def forward(self, idx, targets):
        return None, self.llama(input_ids=idx, labels=targets, use_cache=False).loss


# --- levers --------------------------------------------------------------------------------------


class Levers:
    """What a row's name asks for after its first colon. Raises ValueError for any other word."""

    def __init__(self, words):
        self.name = ':'.join(words)
        self.values = dict(read_lever(word) for word in words)
        self.eager = 'eager' in self.values
        self.checkpointed = 'checkpointed' in self.values
        self.half = 'half' in self.values
        self.ddp_first = 'ddp-first' in self.values
        self.kernels = [KERNELS[word] for word in words if word in KERNELS]
        self.mode = self.values.get('mode')
        self.ddp = {'static_graph': 'static' in self.values}
        if 'bucket' in self.values:
            # Without it, torch's own sizes, as in train.py: 25 MiB, and 1 MiB for the first bucket.
            # An explicit 25 would be the size of all.
            self.ddp['bucket_cap_mb'] = self.values['bucket']
        for lever in OF_COMPILER:
            refuse(
                self.eager and lever in self.values,
                f"{self.name}: {lever} is the compiler's, it does nothing with eager; drop one",
            )

    @property
    def graphs(self):
        """Whether this row runs as CUDA graphs."""
        if self.eager or not self.mode:
            return False
        return torch._inductor.list_mode_options(self.mode).get('triton.cudagraphs', False)

    def cache_key(self):
        """What tells the code compiled for this row from that of others: kernels and levers."""
        return f'{torch.compiler.config.cache_key_tag} {self.name}'

    def of_training(self):
        """The first lever that only a training step has; None where there is none."""
        return next((name for name in self.values if name in OF_TRAINING), None)

    def compile(self, model, settings):
        """The model, compiled unless the settings or `eager` forbid it."""
        if self.eager or not settings.compile:
            return model
        options = torch._inductor.list_mode_options(self.mode) if self.mode else {}
        # Rows with equal options would share the code compiled for the first of them, whatever
        # their levers and kernels are. This option only tells them apart.
        options['trace.debug_dir'] = self.cache_key()
        return torch.compile(model, options=options)

    @contextlib.contextmanager
    def pulled(self):
        """Set the levers while a row compiles or takes a step: other rows have other levers."""
        with contextlib.ExitStack() as stack:
            # So that the compiler's cache on disk tells rows apart, too.
            stack.enter_context(torch.compiler.config.patch(cache_key_tag=self.cache_key()))
            if 'chunk' in self.values:
                rows = self.values['chunk']
                stack.enter_context(replaced(model_file, 'rows_per_chunk', lambda _: rows))
            if self.kernels:
                stack.enter_context(sdpa_kernel(self.kernels))
            if 'budget' in self.values:
                budget = self.values['budget']
                stack.enter_context(functorch_config.patch(activation_memory_budget=budget))
            if 'ddp-whole' in self.values:
                stack.enter_context(torch._dynamo.config.patch(optimize_ddp=False))
            yield


def halve_residual_stream(model, dtype):
    """Let each block read its input in this dtype, and so add its outputs to it in this dtype.

    The embeddings' sum starts the stream in fp32; autocast does not change that.
    """

    def cast(block, args):
        x, *others = args
        return x.to(dtype), *others

    for block in model.transformer.h:
        block.register_forward_pre_hook(cast)


@contextlib.contextmanager
def replaced(module, name, value):
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def read_lever(word):
    """(name, value) of a lever; the value of one that is only on or off is True."""
    name, _, text = word.partition('=')
    modes = torch._inductor.list_mode_options()
    if word in FLAGS:
        return word, True
    if name in ('chunk', 'bucket') and text.isdecimal() and int(text) > 0:
        return name, int(text)
    if name == 'budget' and re.fullmatch(r'0(\.\d+)?', text):
        return name, float(text)
    if name == 'mode' and text in modes:
        return name, text
    raise ValueError(
        f'no lever {word!r}; there are {", ".join(sorted(FLAGS))}, chunk=N, bucket=N, budget=0.N '
        f'and mode={" or ".join(modes)}'
    )
