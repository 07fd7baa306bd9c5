"""What hub/conform.py says of others' code (the table of hub/PORTING.md)."""

import checkpoints
import foreign_ports
import pytest

from hub.conform import LEVELS, OBSERVE, check_port, read_fixture

quiet = checkpoints.quiet

# (port, number of its arguments, variants, how many of each variant's checks fail)
FOUND = [
    ('llama', 2, ('vanilla', 'gqa'), 0),
    ('Export', 2, ('svformer-gqa', 'half-heads', 'first-token', 'fused-kv'), 0),
    ('authors', 2, ('resformer-gqa', 'neutreno', 'neutreno-resformer'), 0),
    ('authors', 2, ('svformer',), 1),
    ('x_transformers', 4, ('resformer', 'head-gate', 'token'), 0),
    ('nanochat', 4, ('token-head-gate',), 0),
    ('rwkv7', 4, ('channel-gate', 'token-channel-gate'), 0),
]


@pytest.mark.parametrize(('name', 'arguments', 'variants', 'failures'), FOUND)
def test_the_kit_finds_in_others_code_what_the_page_says(
    name, arguments, variants, failures, capsys
):
    level = LEVELS[arguments]
    port, cases = getattr(foreign_ports, name), read_fixture()[level]
    for variant in variants:
        try:
            found = check_port(OBSERVE[level], port, variant, cases[variant])
        except (foreign_ports.Absent, ImportError) as error:
            pytest.skip(str(error))
        assert found == failures
    said = capsys.readouterr().out
    assert ('a cache where none is needed' in said) == bool(failures)
