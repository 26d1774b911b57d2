//! What can go wrong on a device.

/// Errors of device operations. They end the process's work on that device; a request cannot cause
/// them.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Memory ran out.
    #[error("out of device memory: {wanted} bytes wanted for {what}")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// Bytes asked for.
        wanted: usize,
    },
    /// A weight has a stored form that the device cannot read.
    #[error("{device} cannot use a {format} weight of {rows} x {cols}: {reason}")]
    Unsupported {
        /// Name of the device.
        device: &'static str,
        /// Stored form.
        format: String,
        /// Rows of the weight.
        rows: usize,
        /// Columns of the weight.
        cols: usize,
        /// Why not.
        reason: String,
    },
    /// The thread pool could not start.
    #[error("cannot start {threads} threads: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// The thread that runs the device has ended.
    #[error("the device's thread has stopped")]
    Stopped,
    /// A step names a slot without a sequence.
    #[error("slot {slot} has no sequence")]
    EmptySlot {
        /// The slot.
        slot: u32,
    },
}
