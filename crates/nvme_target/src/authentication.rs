//! The authentication of a queue, if its host must authenticate.
//!
//! It runs on a control thread of the transport, within a deadline: the exponentiations of a large
//! group take milliseconds that no core could spare. Every queue of a host authenticates itself, as
//! Linux does. A connection has one attempt, and an address has a limited number of failures within
//! a time.
//!
//! Source: Base Specification 2.0, 8.13.2 and 8.13.3.

use crate::controller::Controller;
use crate::refusal::Refusal;
use nvme::fabrics::{FabricsType, auth};
use nvme::{Sgl, Status, SubmissionEntry};
use nvme_auth::access::Proof;
use nvme_auth::controller::{OutOfTurn, Outcome};
use nvme_auth::response::Parties;
use nvme_auth::{Group, Hash};
use std::sync::Arc;

/// Maximum commands before the authentication ends; it takes five.
const MAX_COMMANDS: u32 = 32;

/// The next step of a connection after a command of a host that must authenticate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The host sends more commands.
    More,
    /// The host has authenticated.
    Serve,
    /// The connection ends once the answer has been sent.
    Leave,
}

/// The result of a successful command.
pub enum Response {
    /// Dwords 0 and 1 of the completion.
    Result(u64),
    /// Data for the host.
    Data(Vec<u8>),
}

/// The authentication of one queue.
pub struct Authentication {
    controller: Arc<Controller>,
    queue_id: u16,
    handshake: nvme_auth::Controller,
    commands: u32,
    peer: Box<str>,
}

impl Authentication {
    /// The authentication of a host that owes a proof on a queue.
    pub fn new(controller: &Arc<Controller>, queue_id: u16, peer: &str, proof: Proof) -> Authentication {
        let Proof { keys, choices } = proof;
        let parties =
            Parties { host: controller.host.nqn.clone(), subsystem: controller.subsystem.nqn.clone() };
        let handshake = nvme_auth::Controller::new(parties, keys, choices);
        Authentication { controller: controller.clone(), queue_id, handshake, commands: 0, peer: peer.into() }
    }

    /// Executes a command, with the data in its capsule.
    pub fn command(&mut self, entry: &SubmissionEntry, data: &[u8]) -> (Result<Response, Refusal>, Step) {
        self.commands += 1;
        let result = match FabricsType::of(entry) {
            Some(FabricsType::AuthenticationSend) => self.send(entry, data),
            Some(FabricsType::AuthenticationReceive) => self.receive(entry),
            Some(FabricsType::Connect) => Err(Status::COMMAND_SEQUENCE_ERROR),
            Some(FabricsType::Disconnect) if self.queue_id == 0 => Err(Status::INVALID_QUEUE_TYPE),
            Some(FabricsType::Disconnect) => return (Ok(Response::Result(0)), Step::Leave),
            _ => Err(Status::AUTHENTICATION_REQUIRED),
        };
        let step = match self.handshake.outcome() {
            Outcome::Authenticated => Step::Serve,
            Outcome::Failed(_) => Step::Leave,
            Outcome::Pending if self.commands >= MAX_COMMANDS => Step::Leave,
            Outcome::Pending => Step::More,
        };
        self.note(step);
        (result.map_err(Refusal::from), step)
    }

    fn send(&mut self, entry: &SubmissionEntry, data: &[u8]) -> Result<Response, Status> {
        let len = auth::parse_len(&entry.cdw).ok_or(Status::INVALID_FIELD)?;
        match entry.sgl {
            Sgl::InCapsule { offset: 0, len: said } if said == len && data.len() == len as usize => {}
            Sgl::InCapsule { offset: 1.., .. } => return Err(Status::INVALID_SGL_OFFSET),
            Sgl::InCapsule { .. } => return Err(Status::INVALID_SGL_LENGTH),
            // Messages are short; the host knows that it may send them in the capsule (TCP
            // 3.3.2.1).
            Sgl::Transport { .. } | Sgl::None | Sgl::Other { .. } => return Err(Status::INVALID_SGL_TYPE),
        }
        self.handshake.take(data).map_err(|OutOfTurn| Status::COMMAND_SEQUENCE_ERROR)?;
        Ok(Response::Result(0))
    }

    fn receive(&mut self, entry: &SubmissionEntry) -> Result<Response, Status> {
        let len = auth::parse_len(&entry.cdw).ok_or(Status::INVALID_FIELD)?;
        let Sgl::Transport { len: room } = entry.sgl else { return Err(Status::INVALID_SGL_TYPE) };
        let message = self.handshake.owed().ok_or(Status::COMMAND_SEQUENCE_ERROR)?.to_vec();
        if room != len {
            return Err(Status::INVALID_SGL_LENGTH);
        }
        if message.len() > len as usize {
            return Err(Status::INVALID_FIELD);
        }
        self.handshake.deliver();
        Ok(Response::Data(message))
    }

    /// Logs the result.
    fn note(&self, step: Step) {
        let Controller { subsystem, host, id, .. } = &*self.controller;
        let (export, host, peer, queue) = (&*subsystem.export, host.nqn.as_str(), &*self.peer, self.queue_id);
        match (step, self.handshake.outcome()) {
            (Step::Serve, _) => {
                let (hash, group) = self.handshake.chosen().unzip();
                let (hash, group) = (hash.map(Hash::name), group.map(Group::name));
                tracing::info!(export, peer, host, controller = id, queue, hash, group, "host authenticated");
            }
            (Step::Leave, Outcome::Failed(reason)) => {
                subsystem.failures.note(peer);
                tracing::warn!(export, peer, host, queue, %reason, "host authentication failed");
            }
            (Step::Leave, _) => {
                tracing::warn!(export, peer, host, queue, "host authentication failed: too many commands");
            }
            (Step::More, _) => {}
        }
    }
}
