# Table 3: sequences of 32000 tokens at nearly the same tokens a step: 32 micro-batches * 2 =
# 64 sequences.
# An overlay:
# $ python train.py config/svformer_82m.py config/seq_32000.py --out_dir=out/svformer_82m_32000
block_size = 32000
batch_size = 2
