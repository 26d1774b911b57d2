//! Connections whose other side must read.

use std::future::Future;
use std::io::{Error, ErrorKind, IoSlice, Result};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// A connection that fails with [`ErrorKind::TimedOut`] when nothing of what is to be sent has been
/// taken for a while. Whoever takes a little from time to time is waited for.
pub struct WriteLimit<S> {
    stream: S,
    limit: Duration,
    /// Runs while there is something to send that is not taken.
    patience: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteLimit<S> {
    /// `limit`: longest time without progress.
    pub fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, patience: None }
    }

    /// The result of an attempt to send, or the error if there were only vain ones for too long.
    fn judge<T>(&mut self, attempt: Poll<Result<T>>, cx: &mut Context<'_>) -> Poll<Result<T>> {
        if attempt.is_ready() {
            self.patience = None;
            return attempt;
        }
        let limit = self.limit;
        let patience = self.patience.get_or_insert_with(|| Box::pin(sleep(limit)));
        ready!(patience.as_mut().poll(cx));
        let message = format!("nothing that was sent has been read for {} s", limit.as_secs_f64());
        Poll::Ready(Err(Error::new(ErrorKind::TimedOut, message)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteLimit<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteLimit<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.judge(attempt, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<Result<usize>> {
        let attempt = Pin::new(&mut self.stream).poll_write_vectored(cx, parts);
        self.judge(attempt, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let attempt = Pin::new(&mut self.stream).poll_flush(cx);
        self.judge(attempt, cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<()>> {
        let attempt = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.judge(attempt, cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    #[tokio::test]
    async fn a_side_that_does_not_read_is_given_up() {
        let (near, _far) = duplex(8);
        let mut near = WriteLimit::new(near, Duration::from_millis(50));
        let error = near.write_all(&[0; 9]).await.expect_err("one byte has no room");
        assert_eq!(error.kind(), ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_side_that_reads_slowly_is_waited_for() {
        let (near, mut far) = duplex(8);
        let mut near = WriteLimit::new(near, Duration::from_secs(2));
        let sender = tokio::spawn(async move { near.write_all(&[7; 120]).await });
        // Eight bytes at a time: more than the limit in all.
        let mut read = 0;
        while read < 120 {
            sleep(Duration::from_millis(200)).await;
            read += far.read(&mut [0; 8]).await.expect("bytes");
        }
        sender.await.expect("no panic").expect("all is sent");
    }
}
