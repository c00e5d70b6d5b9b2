"""The requests of TRL's client for asynchronous GRPO, as it makes them, on the admin listener."""


def test_its_phases_are_understood_and_its_transport_is_refused_by_name(serving, tmp_path):
    async def scenario(server):
        admin = server.admin
        models = (await server.client.get("/v1/models")).json["data"][0]["max_model_len"]
        paused = await admin.post("/pause?mode=keep")
        nccl = await admin.post(
            "/init_weight_transfer_engine",
            {"init_info": {"master_address": "10.0.0.1", "master_port": 1234, "rank_offset": 1, "world_size": 2}},
        )
        started = await admin.post("/start_weight_update", {"is_checkpoint_format": True})
        files = await admin.post("/update_weights", {"update_info": {"paths": [str(tmp_path / "a.safetensors")]}})
        finished = await admin.ask("POST", "/finish_weight_update", b"", {})
        resumed = await admin.post("/resume")
        return models, paused, nccl, started, files, finished, resumed

    models, paused, nccl, *others = serving(scenario, options={"allowed_weight_dirs": [str(tmp_path)]})
    assert models > 0 and paused.json == {"status": "paused"}
    assert nccl.status == 400 and "weights come so: file." in nccl.error["message"]
    assert [each.status for each in others] == [200] * 4, [each.body for each in others]
