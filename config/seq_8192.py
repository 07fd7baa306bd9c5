# Table 3: sequences of 8192 tokens at the same tokens a step: 32 micro-batches * 8 = 256 sequences.
# An overlay:
# $ python train.py config/svformer_82m.py config/seq_8192.py --out_dir=out/svformer_82m_8192
block_size = 8192
batch_size = 8
