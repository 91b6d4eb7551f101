CREATE TABLE outbox_migration (
    version INTEGER NOT NULL, applied_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    PRIMARY KEY (version)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE TABLE outbox_event (
    id CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    event_id CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    destination VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    aggregate_type VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    aggregate_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    event_type VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL, payload JSON,
    payload_data LONGBLOB, payload_encoding VARCHAR(50) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
    headers JSON NOT NULL, ordering_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
    `position` BIGINT NOT NULL AUTO_INCREMENT UNIQUE,
    status VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'pending',
    idempotency_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0, max_attempts INTEGER NOT NULL DEFAULT 5,
    crashes INTEGER NOT NULL DEFAULT 0, next_attempt_at DATETIME(6) DEFAULT (UTC_TIMESTAMP(6)),
    leased_until DATETIME(6), lease_token CHAR(32) CHARACTER SET ascii COLLATE ascii_bin,
    lease_owner VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), last_attempt_at DATETIME(6),
    delivered_at DATETIME(6), error_message TEXT,
    due_destination VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin AS (IF(status IN ('pending'), destination, NULL)) STORED,
    head_destination VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin AS (IF(status IN ('pending', 'failed'), destination, NULL)) STORED,
    failed_destination VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin AS (IF(status IN ('failed'), destination, NULL)) STORED,
    PRIMARY KEY (id),
    CONSTRAINT outbox_event_status CHECK (status IN ('pending', 'delivered', 'failed', 'discarded')),
    CONSTRAINT outbox_event_lease CHECK ((leased_until IS NULL) = (lease_token IS NULL) AND (lease_token IS NULL) = (lease_owner IS NULL)),
    CONSTRAINT outbox_event_final CHECK (status = 'pending' OR (next_attempt_at IS NULL AND leased_until IS NULL)),
    CONSTRAINT outbox_event_parked CHECK (status <> 'pending' OR next_attempt_at IS NOT NULL OR ordering_key IS NOT NULL),
    CONSTRAINT outbox_event_delivered CHECK ((status = 'delivered') = (delivered_at IS NOT NULL)),
    CONSTRAINT outbox_event_payload CHECK ((payload IS NULL) <> (payload_data IS NULL) AND (payload_data IS NULL) = (payload_encoding IS NULL)),
    CONSTRAINT outbox_event_counts CHECK (attempts >= 0 AND max_attempts >= 1 AND crashes >= 0)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE INDEX idx_outbox_event_aggregate ON outbox_event (aggregate_type, aggregate_id);
CREATE INDEX idx_outbox_event_dead ON outbox_event (failed_destination, `position`);
CREATE INDEX idx_outbox_event_due ON outbox_event (due_destination, next_attempt_at, `position`);
CREATE INDEX idx_outbox_event_head ON outbox_event (head_destination, ordering_key, `position`);
CREATE INDEX idx_outbox_event_kept ON outbox_event (destination, delivered_at);
CREATE TABLE outbox_idempotency (
    event_type VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    idempotency_key VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    event_id CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    created_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), PRIMARY KEY (event_type, idempotency_key)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE INDEX idx_outbox_idempotency_created ON outbox_idempotency (created_at);
CREATE TABLE outbox_attempt (
    delivery_id CHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL, attempt INTEGER NOT NULL,
    failed_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    relay VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL, error_message TEXT NOT NULL,
    PRIMARY KEY (delivery_id, attempt)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE TABLE outbox_destination (
    name VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL, paused_at DATETIME(6),
    paused_until DATETIME(6), paused_by VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin,
    pause_reason TEXT,
    circuit VARCHAR(20) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL DEFAULT 'closed',
    circuit_until DATETIME(6), circuit_reason TEXT, rate_at DATETIME(6),
    updated_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), PRIMARY KEY (name),
    CONSTRAINT outbox_destination_circuit CHECK (circuit IN ('closed', 'open', 'half_open'))
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE TABLE outbox_relay (
    name VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    host VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL, pid INTEGER NOT NULL,
    version VARCHAR(50) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    started_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    seen_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), term BIGINT, leads_until DATETIME(6),
    PRIMARY KEY (name)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE TABLE outbox_leader (
    name VARCHAR(50) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    relay VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL, term BIGINT NOT NULL,
    leads_until DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), PRIMARY KEY (name)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE TABLE outbox_audit (
    id BIGINT NOT NULL AUTO_INCREMENT, at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    actor VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    action VARCHAR(50) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL, details JSON NOT NULL,
    affected INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (id)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE INDEX idx_outbox_audit_at ON outbox_audit (at);
CREATE TABLE outbox_stats (
    minute DATETIME(6) NOT NULL,
    destination VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    relay VARCHAR(200) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    delivered INTEGER NOT NULL DEFAULT 0, retried INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0, lag JSON NOT NULL, PRIMARY KEY (minute, destination, relay)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE TABLE inbox_message (
    consumer VARCHAR(100) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    message_id VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin NOT NULL,
    processed_at DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)), PRIMARY KEY (consumer, message_id)
)ENGINE=InnoDB DEFAULT CHARSET=utf8mb4;
CREATE INDEX idx_inbox_message_processed ON inbox_message (processed_at);
INSERT INTO outbox_migration (version) VALUES (1);
