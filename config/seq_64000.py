# Table 3: sequences of 64000 tokens at nearly the same tokens a step: 32 micro-batches * 1 =
# 32 sequences.
# An overlay:
# $ python train.py config/svformer_82m.py config/seq_64000.py --out_dir=out/svformer_82m_64000
block_size = 64000
batch_size = 1
