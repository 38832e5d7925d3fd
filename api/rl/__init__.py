"""What reinforcement learning needs besides OpenAI's endpoints: jobs."""
