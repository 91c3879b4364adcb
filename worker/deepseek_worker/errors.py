"""Every error the worker raises on purpose.

```
WorkerError
├── ModelError                the model cannot be served; the process ends with the reason
│   ├── ModelNotFound         no such file or folder, or nothing to serve in it
│   ├── UnsupportedModel      an architecture, rope scaling or quantization that is not served
│   ├── BrokenCheckpoint      cut short, missing, left-over or wrongly shaped tensors
│   └── ModelTooLarge         weights and one request's KV cache exceed the memory limit
├── DeviceUnavailable         no such device, or one that cannot be used
├── DeviceFault               the device failed while computing, and computes nothing any more
├── MemoryHeld                another process holds the device's memory, and does not let go
├── RequestError              this request is wrong; the client gets a 4xx
│   ├── InvalidRequest        a value that no model could serve
│   ├── RequestTooLarge       longer than the context or than the whole page pool
│   ├── BodyTooLarge          more bytes than any request needs
│   ├── UnknownModel          a model that is not served here
│   ├── Unauthorized          no API key, or a wrong one
│   └── TemplateError         the chat template is missing or refuses the messages
├── Unavailable               the request is fine, the worker cannot take it; 429 or 503
│   ├── QueueFull
│   ├── Draining
│   └── EngineFailed
├── InvalidFlags              the command line contradicts itself
├── ProcessEnded              another process of this worker ended, for the reason that it gave
└── SourceError               the model cannot be downloaded; the loader ends with the reason
    ├── SourceNotFound        no such repository, revision or file
    ├── CredentialsRefused    the server wants a token, or another one
    ├── ChecksumMismatch      the server's bytes are not the promised ones
    ├── NoSpace               the destination is full
    └── Unreachable           no complete answer in spite of many attempts
```

`reason` is a fixed word: it goes into conditions, termination messages and metric labels. Those
of errors that end the process are `deepseek_contract.state.FailureReason`.
`exit_code` is what a process that ends with the error returns; 2 is the command line's.
"""


class WorkerError(Exception):
    """Base of the tree."""

    reason = "InternalError"
    exit_code = 1


class ModelError(WorkerError):
    """The model cannot be served as it is."""

    reason = "ModelUnusable"
    exit_code = 3


class ModelNotFound(ModelError):
    """There is nothing to serve at the given path."""

    reason = "ModelNotFound"


class UnsupportedModel(ModelError):
    """The model is sound, but this worker does not know how to run it."""


class BrokenCheckpoint(ModelError):
    """The files contradict themselves or the model's configuration."""


class ModelTooLarge(ModelError):
    """The model does not fit the memory this worker may use."""

    reason = "ModelTooLarge"


class DeviceUnavailable(WorkerError):
    """The asked device is not there or cannot be used."""

    reason = "DeviceUnavailable"


class DeviceFault(WorkerError):
    """The device failed and computes nothing for this process any more."""

    reason = "DeviceFault"


class MemoryHeld(WorkerError):
    """Another process, mostly the one before this one, holds memory of the device."""

    reason = "MemoryHeld"


class RequestError(WorkerError):
    """The client has to change the request.

    Attributes:
        param: The field that is wrong, as a path into the body.
        code: A fixed word for programs.
    """

    reason = "InvalidRequest"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class InvalidRequest(RequestError):
    """A value is out of its range, whatever the load."""


class RequestTooLarge(RequestError):
    """The request can never fit, however long it waits."""

    reason = "RequestTooLarge"


class BodyTooLarge(RequestError):
    """The body has more bytes than any request needs."""

    reason = "BodyTooLarge"


class UnknownModel(RequestError):
    """The client asks for a model that is not served here."""

    reason = "UnknownModel"


class Unauthorized(RequestError):
    """The client has no API key, or a wrong one."""

    reason = "Unauthorized"


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
    """The engine ended with an error; the worker has to be replaced."""

    reason = "EngineFailed"


class TemplateError(RequestError):
    """The chat template is missing, or it refuses these messages."""

    reason = "TemplateError"


class InvalidFlags(WorkerError):
    """The command line asks for what cannot be."""

    reason = "InvalidFlags"
    exit_code = 2


class ProcessEnded(WorkerError):
    """A process without which the worker cannot go on has ended."""

    def __init__(
        self, message: str, reason: str = WorkerError.reason, exit_code: int = WorkerError.exit_code
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.exit_code = exit_code


class SourceError(WorkerError):
    """The model's source does not give what it should."""

    reason = "SourceError"
    exit_code = 10


class SourceNotFound(SourceError):
    """The source names something that the server does not have."""

    reason = "NotFound"
    exit_code = 11


class CredentialsRefused(SourceError):
    """The server wants a token, or does not accept the given one."""

    reason = "CredentialsRefused"
    exit_code = 12


class ChecksumMismatch(SourceError):
    """What came is not what was promised; it has been deleted."""

    reason = "ChecksumMismatch"
    exit_code = 13


class NoSpace(SourceError):
    """The destination has less room than the model needs."""

    reason = "NoSpace"
    exit_code = 14


class Unreachable(SourceError):
    """The server could not be reached, or did not finish its answer."""

    reason = "Unreachable"
    exit_code = 15


def reasons(base: type[WorkerError] = WorkerError) -> tuple[str, ...]:
    """The fixed words of the tree, each once, in the order of the tree."""
    found = {base.reason: None}
    for kind in base.__subclasses__():
        found |= dict.fromkeys(reasons(kind))
    return tuple(found)
