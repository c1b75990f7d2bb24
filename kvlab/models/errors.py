"""What can go wrong when a model is loaded. Every message names the value, the rule and the fix."""


class ModelError(ValueError):
    """A model that cannot be loaded; the message names the value, the rule and the fix."""


class UnknownModelError(ModelError):
    """No alias, folder, file or hub id of that name."""


class NotFetchedError(ModelError):
    """The weights are not here and could not be downloaded."""


class WrongHashError(ModelError):
    """Downloaded bytes differ from the recorded sha256."""


class NoSpaceError(ModelError):
    """The disk cannot hold the converted model."""


class NotCausalLMError(ModelError):
    """The model has no decoder-only key-value cache to compress."""
