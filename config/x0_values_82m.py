# Each second layer adds its own projection of x_0, as much as a gate of each token and head says: the
# slowrun record that replaced tables.
from config.vanilla_82m import *

out_dir = 'out/x0_values_82m'
v_residual = 'x0'
residual_layers = (1, 3, 5, 7)
residual_weights = 'head'
gate_inputs = 32
residual_lambda = (2.0, 1.0)
