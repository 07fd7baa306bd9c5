# Table 3: sequences of 512 tokens at the same tokens a step: 32 micro-batches * 128 = 4,096
# sequences. An overlay:
# $ python train.py config/svformer_82m.py config/seq_512.py --out_dir=out/svformer_82m_512
block_size = 512
batch_size = 128
