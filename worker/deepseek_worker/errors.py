"""Every error the worker raises on purpose.

```
WorkerError
├── ModelError                the model cannot be served; the process ends with the reason
│   ├── ModelNotFound         no such file or folder, or nothing to serve in it
│   ├── UnsupportedModel      an architecture, rope scaling or quantization that is not served
│   ├── BrokenCheckpoint      cut short, missing, left-over or wrongly shaped tensors
│   └── ModelTooLarge         weights and one request's KV cache exceed the memory limit
├── RequestError              this request is wrong; the client gets a 4xx
│   ├── InvalidRequest        a value that no model could serve
│   └── RequestTooLarge       longer than the context or than the whole page pool
├── Unavailable               the request is fine, the worker cannot take it; 429 or 503
│   ├── QueueFull
│   ├── Draining
│   └── EngineFailed
└── TemplateError             the chat template is missing or refuses the messages
```

`reason` is a fixed word: it goes into conditions, termination messages and metric labels.
"""


class WorkerError(Exception):
    """Base of the tree."""

    reason = "InternalError"


class ModelError(WorkerError):
    """The model cannot be served as it is."""

    reason = "ModelError"


class ModelNotFound(ModelError):
    """There is nothing to serve at the given path."""

    reason = "ModelNotFound"


class UnsupportedModel(ModelError):
    """The model is sound, but this worker does not know how to run it."""

    reason = "UnsupportedModel"


class BrokenCheckpoint(ModelError):
    """The files contradict themselves or the model's configuration."""

    reason = "BrokenCheckpoint"


class ModelTooLarge(ModelError):
    """The model does not fit the memory this worker may use."""

    reason = "ModelTooLarge"


class RequestError(WorkerError):
    """The client has to change the request."""

    reason = "InvalidRequest"


class InvalidRequest(RequestError):
    """A value is out of its range, whatever the load."""


class RequestTooLarge(RequestError):
    """The request can never fit, however long it waits."""

    reason = "RequestTooLarge"


class Unavailable(WorkerError):
    """The client may try again later."""

    reason = "Unavailable"


class QueueFull(Unavailable):
    """As many requests wait as are allowed to."""

    reason = "QueueFull"


class Draining(Unavailable):
    """The worker finishes what it has and takes nothing new."""

    reason = "Draining"


class EngineFailed(Unavailable):
    """The engine's thread ended with an error; the process has to be replaced."""

    reason = "EngineFailed"


class TemplateError(RequestError):
    """The chat template is missing, or it refuses these messages."""

    reason = "TemplateError"
