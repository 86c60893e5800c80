"""Models by name."""

MODELS = {}


def register_model(name):
    def register(kind):
        MODELS[name] = kind
        return kind

    return register
