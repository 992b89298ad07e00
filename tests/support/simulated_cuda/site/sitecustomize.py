"""Read by Python when it starts, where `support.simulated_cuda.environment` put this folder on its path."""

import support.simulated_cuda

support.simulated_cuda.install()
