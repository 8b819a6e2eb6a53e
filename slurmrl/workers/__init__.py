"""The processes of a run: supervisor, agent, worker and master.

There is one supervisor per job, one agent per host, one worker per rank and incarnation, and one
master per incarnation. Only workers and their fork server import torch.

    supervisor ──► agent ──► fork server ──► worker      a pipe from the agent to each of them
                     └─────► master                   on the first host of the trainer group

The master appends messages to the control log. Agents read this log and forward each message to
their workers. Workers answer through their agent, which appends the answers to its log. The master
reads the agents' logs. `messages` defines every message.
"""
