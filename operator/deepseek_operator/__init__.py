"""The operator: turns DeepSeekDeployments into worker pods and keeps them as wanted."""
