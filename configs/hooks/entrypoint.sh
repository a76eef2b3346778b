#!/bin/sh
# Container entry point: judges the command it is given and becomes it, or refuses with the reason.
#   ENTRYPOINT ["/entrypoint.sh"]
#   CMD ["llama-server", "-m", "/models/model.gguf", "-c", "32768"]
exec residency run --wait-for-memory "${RESIDENCY_WAIT:-30}" -- "$@"
