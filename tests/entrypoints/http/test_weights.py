"""Updates of the weights by HTTP: phases, files and what is refused."""

import math

import pytest


@pytest.fixture
def folder(tmp_path):
    """A folder from which weights may come."""
    (tmp_path / "weights").mkdir()
    return tmp_path / "weights"


def test_weights_come_in_parts_and_are_told(serving, folder):
    async def scenario(server):
        admin = server.admin
        init = await admin.post("/init_weight_transfer_engine", {"init_info": {"backend": "file"}})
        start = await admin.post("/start_weight_update", {})
        parts = [{"update_info": {"paths": [str(folder / name)]}} for name in ("a.safetensors", "b.safetensors")]
        updates = [await admin.post("/update_weights", part) for part in parts]
        between = (await admin.get("/weight_info")).json
        finish = await admin.post("/finish_weight_update", {"version": "step 3"})
        answer = await server.client.post("/v1/completions", {"prompt": "a", "max_tokens": 2})
        return init, start, updates, between, finish, (await admin.get("/weight_info")).json, answer

    allowed = {"allowed_weight_dirs": [str(folder)]}
    init, start, updates, between, finish, info, answer = serving(scenario, options=allowed)
    said = [each.json["message"] for each in (init, start, finish)]
    assert said == ["Weight transfer initialized", "Weight update started", "Weight update finished"]
    assert [update.json["num_bytes"] for update in updates] == [1, 2]
    assert between == {"version": "", "num_updates": 0, "is_updating": True, "num_bytes": 2}
    assert (
        finish.json["version"] == info["version"] == "step 3" and info["num_updates"] == 1 and not info["is_updating"]
    )
    assert answer.status == 200


def test_a_trainer_tells_how_far_its_log_probabilities_are(serving):
    told = {"mean": 1e-6, "p99": None, "largest": 0.25, "num_tokens": 9}

    async def scenario(server):
        public = await server.client.post("/logprob_difference", told)
        return public, await server.admin.post("/logprob_difference", told), server.engine.difference

    public, noted, difference = serving(scenario)
    assert (public.status, noted.status) == (404, 200)
    assert difference == pytest.approx((1e-6, math.nan, 0.25, 9), nan_ok=True)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/logprob_difference", {"mean": -1.0, "p99": 0.0, "largest": 0.0, "num_tokens": 1}, 400, "mean"),
        ("/logprob_difference", {"mean": 0.0, "p99": 0.0, "largest": 0.0, "num_tokens": 0}, 400, "num_tokens"),
        ("/logprob_difference", {"mean": 0.0}, 400, "p99"),
        ("/finish_weight_update", {}, 409, "no update of weights was begun"),
        ("/update_weights", {"update_info": {"paths": ["{folder}/a"]}}, 409, "no update of weights was begun"),
        ("/update_weights", {"update_info": {"paths": ["/etc/passwd"]}}, 400, "does not lie below a folder"),
        ("/update_weights", {"update_info": {"paths": ["{folder}/../a"]}}, 400, "does not lie below a folder"),
        ("/update_weights", {"update_info": {"paths": ["{folder}/link/a"]}}, 400, "does not lie below a folder"),
        ("/update_weights", {"update_info": {"paths": []}}, 400, "names 0 files"),
        ("/update_weights", {"update_info": {"names": ["a"]}}, 400, "names"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, 400, "weights come so: file, transfer."),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 1}}, 400, "weights come so: file"),
        ("/update_weights", {"update_info": {"address": "transfer://127.0.0.1:9"}}, 409, "no update"),
        ("/update_weights", {"update_info": {"address": "transfer://10.0.0.1:9"}}, 400, "host of allowed_weight_hosts"),
        ("/update_weights", {"update_info": {"address": "127.0.0.1:9"}}, 400, "is no transfer://HOST:PORT"),
        ("/update_weights", {"update_info": {"address": "transfer://127.0.0.1"}}, 400, "is no transfer://HOST:PORT"),
        ("/update_weights", {"update_info": {"address": "transfer://[127.0.0.1:9"}}, 400, "is no transfer://HOST:PORT"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": ["file"]}}, 400, "weights come so: file, transfer."),
        (
            "/update_weights",
            {"update_info": {"address": "transfer://127.0.0.1:9", "paths": ["a"]}},
            400,
            "1 files and 1",
        ),
        ("/start_weight_update", {"is_checkpoint_format": False}, 400, "must be the checkpoint"),
        ("/pause?mode=never", None, 400, "mode"),
    ],
)
def test_what_cannot_be_is_refused_and_says_why(serving, folder, path, body, status, said):
    (folder / "link").symlink_to(folder.parent)

    async def scenario(server):
        given = body
        if body and "update_info" in body and "paths" in body["update_info"]:
            paths = [each.replace("{folder}", str(folder)) for each in body["update_info"]["paths"]]
            given = {"update_info": {**body["update_info"], "paths": paths}}
        return await server.admin.post(path, given)

    allowed = {"allowed_weight_dirs": [str(folder)], "allowed_weight_hosts": ["127.0.0.1"]}
    answer = serving(scenario, options=allowed)
    assert answer.status == status and said in answer.error["message"]


def test_a_part_that_does_not_fit_leaves_the_update_and_a_missing_one_the_weights(serving, folder):
    async def scenario(server):
        await server.admin.post("/start_weight_update", {})
        bad = await server.admin.post("/update_weights", {"update_info": {"paths": [str(folder / "bad")]}})
        info = (await server.admin.get("/weight_info")).json
        abandoned = await server.admin.post("/abandon_weight_update")
        again = await server.admin.post("/finish_weight_update", {})
        return bad, info, abandoned, again

    bad, info, abandoned, again = serving(scenario, options={"allowed_weight_dirs": [str(folder)]})
    assert bad.status == 400 and "is truncated" in bad.error["message"] and str(folder) not in bad.error["message"]
    assert info["is_updating"] and info["num_bytes"] == 0
    assert abandoned.status == 200 and again.status == 409


def test_weights_are_pulled_from_hosts_that_are_allowed(serving):
    async def scenario(server):
        init = await server.admin.post("/init_weight_transfer_engine", {"init_info": {"backend": "transfer"}})
        none = await server.admin.post("/init_weight_transfer_engine", {"init_info": {"backend": "file"}})
        await server.admin.post("/start_weight_update", {})
        parts = [{"address": f"transfer://{host}:9"} for host in ("trainer", "127.0.0.1")]
        parts += [{**parts[0], "mapping": mapping} for mapping in ("maxtext", "maxtxt")]
        return init, none, *[await server.admin.post("/update_weights", {"update_info": part}) for part in parts]

    init, none, taken, gone, tree, unknown = serving(
        scenario, options={"allowed_weight_hosts": ["127.0.0.1", "trainer"]}
    )
    assert (init.status, none.status, taken.status) == (200, 400, 200)
    assert taken.json["num_bytes"] == 1
    assert gone.status == 503 and "no weights came from the trainer at" in gone.error["message"]
    assert tree.status == 200 and unknown.status == 400 and "mapping is 'maxtxt'" in unknown.error["message"]


def test_a_pause_and_that_weights_do_not_change_without_a_folder(serving):
    async def scenario(server):
        paused = await server.admin.post("/pause?mode=keep&clear_cache=false")
        states = [(await server.admin.get("/is_paused")).json["is_paused"]]
        resumed = await server.admin.post("/resume")
        states.append((await server.admin.get("/is_paused")).json["is_paused"])
        start = await server.admin.post("/start_weight_update", {})
        public = await server.client.post("/pause")
        return paused.json, resumed.json, states, start.status, public.status

    paused, resumed, states, start, public = serving(scenario)
    assert (paused, resumed, states) == ({"status": "paused"}, {"status": "resumed"}, [True, False])
    assert start == public == 404
