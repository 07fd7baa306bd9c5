"""
transformers' side of an exported variant: `python -m hub.convert export` puts this file and model.py
into the folder.

>>> model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)

Every argument of transformers' own Llama either works or is refused in one line. Its config.json names
the versions of transformers that it was tried with.
"""

import torch
from transformers import Cache, DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_outputs import CausalLMOutputWithPast

from .model import GPT, GPTConfig, rope_tables

# The name of a cache in outputs: cache since transformers 5.24, and before it past_key_values.
CACHE = 'cache' if 'cache' in CausalLMOutputWithPast.__annotations__ else 'past_key_values'

# Options of Llama, of a call or in a config.json, that this model does not compute.
NOT_COMPUTED = (
    'inputs_embeds',
    'output_attentions',
    'output_hidden_states',
    'cu_seq_lens_q',
    'cu_seq_lens_k',
)


class NanoResFormerConfig(PretrainedConfig):
    model_type = 'nanoresformer'
    keys_to_ignore_at_inference = ['past_key_values', 'cache']

    def __init__(self, gpt=None, **kwargs):
        self.gpt = gpt or {}  # GPTConfig's fields
        config = GPTConfig.saved(self.gpt)
        self.hidden_size = config.n_embd
        self.num_hidden_layers = config.n_layer
        self.num_attention_heads = config.n_head
        self.max_position_embeddings = config.block_size
        self.use_cache = kwargs.pop('use_cache', True)
        kwargs['vocab_size'] = config.vocab_size
        kwargs['tie_word_embeddings'] = config.tie_embeddings
        super().__init__(**kwargs)


class Tokens(DynamicLayer):
    """The one layer of a cache of transformers: the keys and values of all our layers together. Like
    transformers' own, it grows with the text; unlike it, it holds only what layers own."""

    cache = None  # a model.KVCache, from the first token on

    def get_seq_length(self):
        return 0 if self.cache is None else int(self.cache.position)

    @torch.compiler.disable
    def grow(self, model, rows, more):
        """The KVCache, with room for more tokens."""
        new = model.new_cache(rows, more)
        length = self.get_seq_length()
        if length:
            new.max_len += length
            new.position += length
            for key, tensor in self.cache.tensors.items():
                new.tensors[key] = torch.cat([tensor[:, :, :length], new.tensors[key]], dim=2)
        self.cache = new
        return new

    def crop(self, tokens):
        """To so many tokens, as transformers 4 has it; or by so many, as a negative number."""
        length = self.get_seq_length()
        left = min(tokens, length) if tokens > 0 else max(length + tokens, 0)
        if length:
            self.cache.position += left - length

    def reset(self):
        self.cache = None

    def change_rows(self, change):
        if self.cache is not None:
            tensors = self.cache.tensors
            tensors.update({key: change(tensor) for key, tensor in tensors.items()})

    def batch_select_indices(self, indices):
        self.change_rows(lambda tensor: tensor[indices.to(tensor.device)])

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats):
        self.change_rows(lambda tensor: tensor.repeat_interleave(repeats, dim=0))


class NanoResFormerForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoResFormerConfig
    base_model_prefix = 'model'
    _supports_sdpa = True
    _tied_weights_keys = {'model.lm_head.weight': 'model.transformer.wte.weight'}

    def __init__(self, config):
        super().__init__(config)
        self.model = GPT(GPTConfig.saved(config.gpt))
        self.post_init()

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        loaded = super().from_pretrained(*args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.reach(0)  # the tables of RoPE are not in the file
        return loaded

    def _init_weights(self, module):
        """Weights come from the file, or are as GPT made them."""

    def reach(self, length):
        """Make the tables of RoPE, for at least so many positions. Like Llama, the model reads more than
        it was trained with: prompt lookup guesses beyond the end, and transformers warns of more."""
        gpt, config = self.model, self.model.config
        if config.arch == 'llama':
            config.block_size = max(length, config.block_size)
            device = gpt.lm_head.weight.device
            gpt.cos, gpt.sin = (table.to(device) for table in rope_tables(config))
        elif length > config.block_size:
            raise ValueError(f'this model has no position beyond block_size={config.block_size}')

    def compute(self, input_ids, past, last_only):
        """Logits. A cache keeps no gradients: its first call is computed again without it, and later calls
        have none."""
        has_own_pass = past is None or (torch.is_grad_enabled() and not past.get_seq_length())
        if past is not None:
            with torch.no_grad():
                cache = past.layers[0].grow(self.model, *input_ids.shape)
                logits, _ = self.model(input_ids, cache=cache, last_only=last_only)
        if has_own_pass:
            logits, _ = self.model(input_ids, last_only=last_only)
        return logits

    def get_input_embeddings(self):
        return self.model.transformer.wte

    def get_output_embeddings(self):
        return self.model.lm_head

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, **kwargs):
        if new_num_tokens or pad_to_multiple_of:
            size = self.config.vocab_size
            raise ValueError(f'this model keeps its vocab_size={size}: new tokens may use free ids')
        return self.get_input_embeddings()

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        logits_to_keep=0,
        cache=None,
        return_dict=None,
        **kwargs,
    ):
        refuse_options(self.config, kwargs)
        if input_ids is None:
            raise ValueError('this model reads input_ids only')
        B, T = input_ids.shape
        past = own_cache(past_key_values, cache)
        start = 0 if past is None else past.get_seq_length()
        is_padded = check_mask(attention_mask, B, start + T)
        trains = self.training and torch.is_grad_enabled()
        if use_cache is None:
            use_cache = self.config.use_cache and not trains and not is_padded
        if use_cache and past is None:
            past = Cache(layers=[Tokens()])
        is_count = isinstance(logits_to_keep, int)
        last_only = is_count and logits_to_keep == 1
        if is_padded and (past is not None or last_only):
            raise ValueError(
                'generation would go on behind the padding: give sequences of equal length'
            )
        if past is not None and trains:
            raise ValueError('a cache keeps no gradients: train with use_cache=False')
        check_positions(position_ids, B, start, T)
        check_positions(kwargs.get('cache_position'), B, start, T)  # transformers 4

        if start + T > self.model.config.block_size:
            self.reach(start + T)
        logits = self.compute(input_ids, past, last_only)
        keep = slice(-logits_to_keep, None) if is_count else logits_to_keep
        logits = logits[:, keep]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        output = CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: past})
        if return_dict is None:
            return_dict = self.config.return_dict
        return output if return_dict else output.to_tuple()


# --- what is refused -----------------------------------------------------------------------------


def refuse_options(config, options):
    for name in NOT_COMPUTED:
        value = options.get(name)
        if value is None:
            value = getattr(config, name, None)
        if value is not None and value is not False:
            raise ValueError(f'this model does not compute {name}: leave it out')
    if options.get('is_causal') is False:
        raise ValueError('this model is causal: leave out is_causal=False')


def own_cache(past_key_values, cache):
    """The cache that was given, by whatever name, or None. An empty DynamicCache becomes one of ours."""
    if cache is None:
        cache = past_key_values
    elif past_key_values is not None:
        raise ValueError('give past_key_values or cache, not both')
    if cache is None or is_own(cache):
        return cache
    if type(cache) is not DynamicCache or cache.offloading or cache.get_seq_length():
        raise ValueError(
            f'this model cannot go on from this {type(cache).__name__}, nor fill one that is static, '
            'offloaded or quantized: give it none, or one that it returned'
        )
    cache.layers = [Tokens()]
    return cache


def is_own(cache):
    layers = getattr(cache, 'layers', None)
    return bool(layers) and isinstance(layers[0], Tokens)


def check_positions(positions, B, start, T):
    if positions is None:
        return
    expected = torch.arange(start, start + T, device=positions.device)
    if positions.shape[-1] != T or not torch.equal(positions.expand(B, T), expected.expand(B, T)):
        raise ValueError(
            f'position_ids must be {start} to {start + T - 1}: this model knows no others'
        )


def check_mask(mask, B, length):
    """Whether an attention mask has padding. ValueError unless all of it is on the right, where causal
    attention never looks."""
    if mask is None:
        return False
    if mask.shape != (B, length):
        raise ValueError(
            f'attention_mask must have the shape {(B, length)}, one number for each token so far, '
            f'not {tuple(mask.shape)}'
        )
    if torch.any(mask[:, 1:] > mask[:, :-1]):
        raise ValueError(
            'this model cannot skip padding on the left, which every later token would attend to: pad on '
            'the right'
        )
    return not torch.all(mask)
