"""Many devices under a load, simulated: what comes (`load`, `trace`), what runs cost (`steps`), kvkeep's scheduler
(`bounded`), a paged full cache (`paged`), and how many devices a load needs (`sizing`)."""
