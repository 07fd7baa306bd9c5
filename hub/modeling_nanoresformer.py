"""
transformers' side of an exported variant: `python -m hub.convert export` puts this file and model.py
into the folder.

>>> model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
"""

import torch
from transformers import Cache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .model import GPT, GPTConfig, rope_tables


class NanoResFormerConfig(PretrainedConfig):
    model_type = 'nanoresformer'

    def __init__(self, gpt=None, **kwargs):
        self.gpt = gpt or {}  # GPTConfig's fields
        config = GPTConfig.saved(self.gpt)
        self.hidden_size = config.n_embd
        self.num_hidden_layers = config.n_layer
        self.num_attention_heads = config.n_head
        self.max_position_embeddings = config.block_size
        kwargs['vocab_size'] = config.vocab_size
        kwargs['tie_word_embeddings'] = config.tie_embeddings
        super().__init__(**kwargs)


class Past(Cache):
    """model.KVCache as generate() wants it: only layers that own keys or values store them."""

    def __init__(self, cache):
        super().__init__(layers=[])
        self.cache = cache

    def get_seq_length(self, layer_idx=0):
        return int(self.cache.position)

    def crop(self, tokens_to_remove):
        self.cache.position += tokens_to_remove  # -n: n fewer

    def reorder_cache(self, beam_idx):
        for tensor in self.cache.tensors.values():
            tensor.copy_(tensor.index_select(0, beam_idx))


class NanoResFormerForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = NanoResFormerConfig
    base_model_prefix = 'model'
    _tied_weights_keys = {'model.lm_head.weight': 'model.transformer.wte.weight'}

    def __init__(self, config):
        super().__init__(config)
        self.model = GPT(GPTConfig.saved(config.gpt))
        self.post_init()

    def _init_weights(self, module):
        # Weights come from the file, or are as GPT made them. Tables are not in the file.
        if isinstance(module, GPT) and module.config.arch == 'llama':
            cos, sin = rope_tables(module.config)
            module.cos.copy_(cos)
            module.sin.copy_(sin)

    def get_input_embeddings(self):
        return self.model.transformer.wte

    def get_output_embeddings(self):
        return self.model.lm_head

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_length, *args
    ):
        if generation_config.use_cache:
            copies = max(
                generation_config.num_beams or 1, generation_config.num_return_sequences or 1
            )
            given = model_kwargs.get('past_key_values')
            model_kwargs['past_key_values'] = self.past(given, batch_size * copies, max_length)

    def past(self, given, rows, max_length):
        """The given Past; a new one in place of None, or of an empty cache of another kind."""
        if isinstance(given, Past):
            return given
        if given is not None and given.get_seq_length() > 0:
            raise ValueError(
                f'this model cannot go on from a {type(given).__name__}: give it none, or its own'
            )
        return Past(self.model.new_cache(rows, min(max_length, self.model.config.block_size)))

    def forward(
        self,
        input_ids,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        labels=None,
        use_cache=False,
        logits_to_keep=0,
        **kwargs,
    ):
        B, T = input_ids.shape
        if attention_mask is not None and not torch.all(attention_mask):
            goes_on = use_cache or past_key_values is not None or logits_to_keep == 1
            refuse_padding(attention_mask, goes_on)
        if use_cache and past_key_values is None and self.training and torch.is_grad_enabled():
            raise ValueError('a cache keeps no gradients: train with use_cache=False')

        cache, start = None, 0
        if use_cache or past_key_values is not None:
            past_key_values = self.past(past_key_values, B, self.model.config.block_size)
            cache, start = past_key_values.cache, past_key_values.get_seq_length()
        if position_ids is not None:
            positions = torch.arange(start, start + T, device=input_ids.device).expand(B, T)
            if not torch.equal(position_ids.expand(B, -1), positions):
                raise ValueError(
                    f'position_ids must be {start} to {start + T - 1}: this model knows no others'
                )

        logits, _ = self.model(input_ids, cache=cache, last_only=logits_to_keep == 1)
        logits = logits[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


def refuse_padding(mask, goes_on):
    """Raise ValueError unless all padding of an attention mask (B, T) is on the right, where causal
    attention never looks, and nothing follows it."""
    if torch.any(mask[:, 1:] > mask[:, :-1]):
        raise ValueError(
            'this model cannot skip padding on the left, which every later token would attend to: pad on '
            'the right'
        )
    if goes_on:
        raise ValueError(
            'generation would go on behind the padding: give sequences of equal length'
        )
