"""The backend that is plain torch: a frozen transformers model in this process, and the adapters of many tenants."""
