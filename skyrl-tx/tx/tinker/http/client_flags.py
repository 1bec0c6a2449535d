"""Protocol options that the SDK requests at its construction."""

from tx.tinker.config import EngineConfig
from tx.tinker.http.api_keys import is_loopback


def get_client_flags(config: EngineConfig) -> dict[str, object]:
    """Return the response of `client/config`. Clients ignore unknown keys."""
    return {
        "pjwt_auth_enabled": False,  # keys are sent as they are, never exchanged for tokens
        "credential_default_source": "api_key",
        "parallel_fwdbwd_chunks": True,
        "proto_write_fwdbwd": True,
        # Packing costs more than it saves where nothing is sent through a network.
        "proto_compress_fwdbwd": not is_loopback(config.host),
        "fwd_via_fwdbwd": True,
        "create_model_via_load_weights": True,
        "fwdbwd_max_chunk_len": 1024,
        "fwdbwd_max_chunk_bytes_count": min(5_000_000, config.max_body_mb * 2**20 // 2),
        "sample_max_concurrent_requests": min(2000, config.max_pending_per_tenant),
        "sample_enable_stuck_detection": True,
        "use_pyqwest_transport": True,
        # Endpoints that this server has not:
        "sample_use_retrieve_futures": False,
        "custom_loss_server_side": False,
        "sample_join_sampling_session": False,
    }


def get_dynamic_flags() -> dict[str, object]:
    """Return the response of `client/dynamic_config`, which clients poll."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": False, "sample_cancel_max_batch_size": 64}
