"""Jobs on the model without weights, as the tests of whole runs have them."""

from tests.run.conftest import echo_job as echo_job
