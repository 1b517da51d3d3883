"""The server process itself: vLLM's own API server. The ``vllm`` command cannot be used: it asks for the metadata of a
distribution named ``vllm``, which CPU builds do not have."""

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    main()
