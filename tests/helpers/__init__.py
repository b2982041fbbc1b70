"""What several tests share: child processes that report, faults, small phrases about queues."""
