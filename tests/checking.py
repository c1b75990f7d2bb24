"""The checker that the import hook in conftest.py puts on annotations."""

from beartype import BeartypeConf, beartype

# An int is a float here, as type checkers have it; what settings do with one is theirs to say.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
