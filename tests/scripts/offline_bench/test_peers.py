"""Environments of peers: nothing is installed here."""

import sys

import pytest
from offline_bench import peers, plan


def test_every_peer_has_its_program_and_its_environment():
    for peer in peers.PEERS.values():
        assert (plan.ENGINES / peer.script).exists()
        assert peer.environment in peers.ENVIRONMENTS


def test_no_fitting_python_is_a_sentence_on_what_to_do():
    with pytest.raises(peers.SetupError, match="uv python install 3.99"):
        peers.find_python(("3.99",))


def test_a_failed_installation_names_the_error_and_the_log(tmp_path):
    with open(tmp_path / "install.log", "w") as log, pytest.raises(peers.SetupError, match=r"ERROR: no such wheel"):
        peers.run_step([sys.executable, "-c", "import sys; sys.exit('ERROR: no such wheel')"], log)
