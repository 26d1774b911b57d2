//! TLS by files.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{self, ServerConfig, crypto::ring};

/// A certificate and its key.
#[derive(Clone, Debug)]
pub struct Tls(Arc<ServerConfig>);

/// Files that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file that cannot be read, or that has no PEM section of the wanted kind.
    #[error("{file}: no {wanted} in PEM form can be read from it: {reason}")]
    File {
        /// The file.
        file: PathBuf,
        /// What it must hold.
        wanted: &'static str,
        /// What went wrong.
        reason: pem::Error,
    },
    /// A certificate and a key that cannot be used, or not together.
    #[error("the certificate and the key cannot be used: {0}")]
    Pair(#[from] rustls::Error),
}

impl Tls {
    /// Reads a certificate chain (the server's own certificate first) and its private key, both in
    /// PEM form.
    pub fn from_files(certificates: &Path, key: &Path) -> Result<Self, TlsError> {
        let file = |path: &Path, wanted| {
            let file = path.to_owned();
            move |reason| TlsError::File { file, wanted, reason }
        };
        let chain = CertificateDer::pem_file_iter(certificates)
            .and_then(|sections| sections.collect::<Result<Vec<_>, _>>())
            .and_then(|all| if all.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(all) })
            .map_err(file(certificates, "certificate"))?;
        let key = PrivateKeyDer::from_pem_file(key).map_err(file(key, "private key"))?;
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Self(Arc::new(config)))
    }

    /// What turns a connection into an encrypted one.
    pub fn acceptor(&self) -> tokio_rustls::TlsAcceptor {
        self.0.clone().into()
    }
}
