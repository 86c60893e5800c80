"""What a model of the harness inherits."""


class CacheHook:
    """Remembers what it is told, in the real one to a file."""

    def __init__(self):
        self.told = []

    def add_partial(self, kind, request, result):
        self.told.append((kind, request, result))


class TemplateLM:
    """Tokenises contexts and what follows together, spaces at the border to what follows."""

    def __init__(self):
        self.cache_hook = CacheHook()

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = []
        for context, continuation in (request.args for request in requests):
            if context:
                stripped = context.rstrip()
                head = self.tok_encode(stripped)
                pairs.append(((context, continuation), head, self.tok_encode(context + continuation)[len(head) :]))
            else:
                tail = self.tok_encode(continuation, add_special_tokens=False)
                pairs.append(((context, continuation), [self.prefix_token_id], tail))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)
