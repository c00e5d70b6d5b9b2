"""A model's name becomes a folder; what cannot is one error that says what to do. No test reaches the network."""

import pytest

from jaxpaged.errors import CheckpointError
from jaxpaged.params.hub import resolve_adapter_folder, resolve_model_folder


@pytest.mark.parametrize("name", ["demo", "demo-vision", "demo-draft", "demo-eagle3"])
def test_the_embedded_models_have_names(name):
    folder = resolve_model_folder(name)
    assert folder.parts[-3:] == ("jaxpaged", "assets", name) and (folder / "model.safetensors").exists()


def test_a_folder_is_taken_as_it_is(tmp_path):
    assert resolve_model_folder(str(tmp_path)) == tmp_path


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model_folder(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["./missing", "/a/b/c", "a/b/c", "-x"])
def test_what_is_neither_folder_nor_hub_id_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        resolve_model_folder(name)


def test_a_hub_id_without_network_says_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match="hub cannot be reached"):
        resolve_model_folder("somebody/something", download_dir=str(tmp_path))


def test_a_cached_hub_model_needs_no_network(tmp_path):
    repository = tmp_path / "models--somebody--something"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)
    assert resolve_model_folder("somebody/something", download_dir=str(tmp_path)) == snapshot
    assert resolve_adapter_folder("somebody/something", download_dir=str(tmp_path)) == snapshot
    with pytest.raises(CheckpointError, match="hub cannot be reached"):
        resolve_adapter_folder("somebody/other", download_dir=str(tmp_path))
