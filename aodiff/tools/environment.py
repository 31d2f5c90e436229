"""Environment variables of commands that compile for a TPU without one; imports nothing."""

# No metadata server on this machine, several checks side by side, and warnings on stderr, where the
# compiler reports involuntary rematerialization (libtpu hides warnings otherwise).
WITHOUT_TPU = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_LOG_DIR": "disabled",
}
