"""From a prompt to a finished group: rewards, environments, engines and the orchestrator."""
